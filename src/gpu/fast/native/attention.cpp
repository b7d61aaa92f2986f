// Attention of queries that each see one run of cells: a chunk that is read, or one token of each row of a step.
//
// The softmax is taken on the way, in float32, over blocks of cells. The cells of few queries are split into pieces at
// fixed positions, which are merged in their order, so that there is work for all threads; where they are split depends
// on a row's own cells and nothing else.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "attention_plain.h"
#include "attention_tiles.h"
#include "copy.h"

namespace regrow {
namespace {

constexpr int PIECE = 512;        // cells
constexpr int MANY_ROWS = 128;    // of a block, where there are more than ROWS: those are enough work with all cells
constexpr float NOTHING = -1e30f; // the largest score where there was none

struct Strides {
  std::ptrdiff_t batch, head, token;
};

struct Call {
  const void *q, *k, *v;
  void* out;
  const std::int32_t *first, *end;  // [batch, n]; end 0: sees nothing
  Strides q_at, k_at, v_at;
  const Lent* lent;  // to the only row there is; k and v are where they belong then
  int batch, n, heads, kv_heads, dim, value_dim, cells;
  float scale;

  int groups() const { return heads / kv_heads; }
  int rows() const { return n * groups(); }
  bool many() const { return rows() > ROWS; }
  int block_rows() const { return many() ? MANY_ROWS : ROWS; }
  int blocks() const { return (rows() + block_rows() - 1) / block_rows(); }

  bool served() const {
    for (std::ptrdiff_t i = 0; i < std::ptrdiff_t(batch) * n; i++) {
      if (first[i] < 0 || end[i] > cells) return false;
      if (lent && (first[i] > 0 || end[i] < lent->stop)) return false;
    }
    if (lent && batch != 1) return false;
    return dim <= MAX_DIM && value_dim <= MAX_DIM && heads % kv_heads == 0;
  }
};

// A block of rows: queries of one key head, tokens first.
struct Rows {
  int batch, head, first_row, count, lo, hi, first_piece, pieces;

  Rows(const Call& call, int index) {
    const int block = call.blocks() - 1 - index % call.blocks();  // those that see most come first
    head = index / call.blocks() % call.kv_heads;       // the blocks of a head in turn: its cells stay in the cache
    batch = index / call.blocks() / call.kv_heads;
    first_row = block * call.block_rows();
    count = std::min(call.block_rows(), call.rows() - first_row);
    lo = INT32_MAX, hi = 0;
    for (int i = token(call, 0); i <= token(call, count - 1); i++) {
      const int at = batch * call.n + i;
      if (call.end[at] > 0) lo = std::min(lo, int(call.first[at])), hi = std::max(hi, int(call.end[at]));
    }
    lo = std::min(lo, hi);
    first_piece = call.many() ? 0 : lo / PIECE;
    pieces = hi <= lo ? 0 : call.many() ? 1 : (hi - 1) / PIECE + 1 - first_piece;
  }

  int token(const Call& call, int row) const { return (first_row + row) / call.groups(); }
  // The place of a row among [batch, n, heads].
  std::ptrdiff_t place(const Call& call, int row) const {
    const int group = (first_row + row) % call.groups();
    return (std::ptrdiff_t(batch) * call.n + token(call, row)) * call.heads + head * call.groups() + group;
  }
};

inline void put(bf16* y, float v) { *y = to_bf16(v); }
inline void put(float* y, float v) { *y = v; }

// Calls run(cell, chain) for all cells in turn with chains, so that results of one do not wait for each other.
constexpr int CHAINS = 4;
template <class Run>
inline void in_chains(int cells, const Run& run) {
  int c = 0;
  for (; c + CHAINS <= cells; c += CHAINS) {
    for (int i = 0; i < CHAINS; i++) run(c + i, i);
  }
  for (; c < cells; c++) run(c, 0);
}

// The cells of one head.
template <class T>
struct Run {
  T* first;
  std::ptrdiff_t step;

  Run(const void* base, std::ptrdiff_t head, std::ptrdiff_t step)
      : first(static_cast<T*>(const_cast<void*>(base)) + head), step(step) {}
  Run(const void* base, const std::int64_t* strides, int head) : Run(base, head * strides[0], strides[1]) {}

  T* at(int cell) const { return first + cell * step; }
  void copy(const Run& to, int cell, int cells, int dim) const {
    const bool whole = step == dim && to.step == dim;
    for (int c = cell; c < cell + cells; c += whole ? cells : 1) {
      copy_past_caches(reinterpret_cast<char*>(to.at(c)), reinterpret_cast<const char*>(at(c)),
                       sizeof(T) * dim * (whole ? cells : 1));
    }
  }
};

template <class Form>
class Attention {
  using T = typename Form::Element;

 public:
  // Attends over the cells [lo, hi) and leaves sums in the form, largest scores and sums of weights here. The first
  // rows put what is lent where it belongs.
  template <int TILES>
  void attend(const Call& call, const Rows& rows, int lo, int hi) {
    constexpr int WIDTH = TILES * LANES;
    begin(call, rows);
    const Run<T> k(call.k, rows.batch * call.k_at.batch + rows.head * call.k_at.head, call.k_at.token);
    const Run<T> v(call.v, rows.batch * call.v_at.batch + rows.head * call.v_at.head, call.v_at.token);
    const int parts = (rows.count + WIDTH - 1) / WIDTH;
    for (int cell = lo; cell < hi; cell += BLOCK) {
      const int cells = std::min(BLOCK, hi - cell);
      const bool lent = call.lent && call.lent->has(cell);
      const Run<T> from_k = lent ? Run<T>(call.lent->keys, call.lent->key_strides, rows.head) : k;
      const Run<T> from_v = lent ? Run<T>(call.lent->values, call.lent->value_strides, rows.head) : v;
      form.take(from_k.at(cell), from_k.step, from_v.at(cell), from_v.step, cells);
      if (lent && rows.first_row == 0) {
        from_k.copy(k, cell, cells, call.dim);
        from_v.copy(v, cell, cells, call.value_dim);
      }
      for (int part = 0; part < parts; part++) {
        const std::int32_t *first = first_ + part * WIDTH, *end = end_ + part * WIDTH;
        const int count = std::min(WIDTH, rows.count - part * WIDTH);
        if (*std::min_element(first, first + count) >= cell + cells || *std::max_element(end, end + count) <= cell) {
          continue;
        }
        const bool all = *std::max_element(first, first + count) <= cell &&
                         *std::min_element(end, end + count) >= cell + cells;
        form.template scores<TILES>(part, scores_);
        if (all) {
          weigh<TILES, true>(part, cell, cells, call.scale);
        } else {
          weigh<TILES, false>(part, cell, cells, call.scale);
        }
        form.template add<TILES>(part, scores_);
      }
    }
  }

  // Writes the result of the rows, which `attend` has seen all cells of.
  void finish(const Call& call, const Rows& rows) const {
    for (int row = 0; row < rows.count; row++) {
      T* out = static_cast<T*>(call.out) + rows.place(call, row) * call.value_dim;
      const float one = sum_[row] == 0 ? 0 : 1 / sum_[row];
      for (int d = 0; d < call.value_dim; d++) put(out + d, form.at(row, d) * one);
    }
  }

  // Writes what the rows have of one piece: for each the largest score, the sum of weights, the sums.
  void keep(const Call& call, const Rows& rows, float* piece) const {
    for (int row = 0; row < rows.count; row++, piece += call.value_dim + 2) {
      piece[0] = top_[row], piece[1] = sum_[row];
      for (int d = 0; d < call.value_dim; d++) piece[2 + d] = form.at(row, d);
    }
  }

  Form form;

 private:
  void begin(const Call& call, const Rows& rows) {
    form.begin(call.dim, call.value_dim, rows.count);
    std::fill_n(first_, ROWS, 0), std::fill_n(end_, ROWS, INT32_MAX);  // rows that are none see everything
    std::fill_n(top_, ROWS, NOTHING), std::fill_n(sum_, ROWS, 0.0f);
    for (int row = 0; row < rows.count; row++) {
      const int token = rows.token(call, row), group = (rows.first_row + row) % call.groups();
      first_[row] = call.first[rows.batch * call.n + token], end_[row] = call.end[rows.batch * call.n + token];
      form.set_query(row, static_cast<const T*>(call.q) + rows.batch * call.q_at.batch +
                              (rows.head * call.groups() + group) * call.q_at.head + token * call.q_at.token);
    }
  }

  // Turns scores into weights relative to the largest score so far, and what was summed before likewise.
  template <int TILES, bool ALL>
  void weigh(int part, int cell, int cells, float scale) {
    constexpr int WIDTH = TILES * LANES;
    const Lanes factor = fill(scale * 1.44269504f);
    const int rows = part * WIDTH;
    alignas(64) float change[WIDTH];
    bool changed = false;
    for (int t = 0; t < TILES; t++) {
      float *s = scores_ + t * LANES, *top = top_ + rows + t * LANES, *sum = sum_ + rows + t * LANES;
      const std::int32_t *first = first_ + rows + t * LANES, *end = end_ + rows + t * LANES;
      const Lanes before = load(top);
      form.ahead(24);
      Lanes most[CHAINS];
      for (Lanes& one : most) one = before;
      in_chains(cells, [&](int c, int chain) {
        Lanes score = load(s + c * WIDTH);
        if (!ALL) score = keep_within(score, cell + c, first, end, NOTHING);
        most[chain] = larger(score, most[chain]);
      });
      for (int i = 1; i < CHAINS; i++) most[0] = larger(most[i], most[0]);
      store(top, most[0]);
      form.ahead(24);
      const Lanes less = multiply(multiply(most[0], factor), fill(-1));
      const Lanes by = power_of_2(multiply(subtract(before, most[0]), factor), EXACT);
      store(change + t * LANES, by);
      Lanes total[CHAINS] = {multiply(load(sum), by)};
      for (int i = 1; i < CHAINS; i++) total[i] = fill(0);
      in_chains(cells, [&](int c, int chain) {
        Lanes weight = power_of_2(multiply_add(load(s + c * WIDTH), factor, less), Form::POWERS);
        if (!ALL) weight = keep_within(weight, cell + c, first, end, 0);
        total[chain] = add(total[chain], weight);
        store(s + c * WIDTH, weight);
      });
      for (int i = 1; i < CHAINS; i++) total[0] = add(total[0], total[i]);
      store(sum, total[0]);
    }
    std::fill(scores_ + cells * WIDTH, scores_ + round_up(cells, 32) * WIDTH, 0.0f);
    for (float by : change) changed |= by != 1;
    if (changed) form.template scale<TILES>(part, change);
  }

  alignas(64) float scores_[BLOCK * 2 * LANES];
  alignas(64) float top_[ROWS], sum_[ROWS];
  alignas(64) std::int32_t first_[ROWS], end_[ROWS];
};

// Merges the pieces of each row in their order.
template <class T>
void merge(const Call& call, const Rows& rows, const float* kept, std::ptrdiff_t piece) {
  const int size = call.value_dim + 2;
  float total[MAX_DIM];
  for (int row = 0; row < rows.count; row++, kept += size) {
    float top = NOTHING, sum = 0;
    for (int p = 0; p < rows.pieces; p++) top = std::max(top, kept[p * piece]);
    std::fill_n(total, call.value_dim, 0.0f);
    for (int p = 0; p < rows.pieces; p++) {
      const float* one = kept + p * piece;
      const float weight = std::exp2((one[0] - top) * (call.scale * 1.44269504f));
      sum += one[1] * weight;
      for (int d = 0; d < call.value_dim; d++) total[d] += one[2 + d] * weight;
    }
    T* out = static_cast<T*>(call.out) + rows.place(call, row) * call.value_dim;
    const float one = sum == 0 ? 0 : 1 / sum;
    for (int d = 0; d < call.value_dim; d++) put(out + d, total[d] * one);
  }
}

// Puts what is lent in less than a block where it belongs.
template <class T>
void fetch_edges(const Call& call) {
  const Lent& lent = *call.lent;
  const int first = std::min(lent.first_cell(), lent.stop), end = std::max(lent.end_cell(), first);
  for (int head = 0; head < call.kv_heads; head++) {
    const Run<T> k(call.k, head * call.k_at.head, call.k_at.token), v(call.v, head * call.v_at.head, call.v_at.token);
    const Run<T> from_k(lent.keys, lent.key_strides, head), from_v(lent.values, lent.value_strides, head);
    from_k.copy(k, lent.start, first - lent.start, call.dim);
    from_v.copy(v, lent.start, first - lent.start, call.value_dim);
    from_k.copy(k, end, lent.stop - end, call.dim);
    from_v.copy(v, end, lent.stop - end, call.value_dim);
  }
}

template <class Form>
void run(const Call& call) {
  using T = typename Form::Element;
  if (call.lent) fetch_edges<T>(call);
  static thread_local std::vector<float> scratch;
  const int blocks = call.batch * call.blocks() * call.kv_heads;
  int most = 1;  // pieces of any block
  std::int64_t work = 0;
  for (int i = 0; i < blocks; i++) {
    const Rows rows(call, i);
    most = std::max(most, rows.pieces);
    work += rows.hi - rows.lo;
  }
  const std::ptrdiff_t piece = std::ptrdiff_t(ROWS) * (call.value_dim + 2);
  if (most > 1 && scratch.size() < std::size_t(blocks * most * piece)) scratch.resize(blocks * most * piece);
  float* kept = scratch.data();
#pragma omp parallel if (work > PIECE)
  {
    static thread_local const auto mine = std::make_unique<Attention<Form>>();
    mine->form.enter();
#pragma omp for schedule(dynamic)
    for (int item = 0; item < blocks * most; item++) {
      const Rows rows(call, item / most);
      const int p = item % most;
      if (p >= std::max(rows.pieces, 1)) continue;
      const bool whole = rows.pieces <= 1;
      const int lo = whole ? rows.lo : std::max(rows.lo, (rows.first_piece + p) * PIECE);
      const int hi = whole ? rows.hi : std::min(rows.hi, (rows.first_piece + p + 1) * PIECE);
      if (rows.count <= LANES) {
        mine->template attend<1>(call, rows, lo, hi);
      } else {
        mine->template attend<2>(call, rows, lo, hi);
      }
      if (whole) {
        mine->finish(call, rows);
      } else {
        mine->keep(call, rows, kept + item * piece);
      }
    }
    if (most > 1) {
#pragma omp for schedule(dynamic)
      for (int i = 0; i < blocks; i++) {
        const Rows rows(call, i);
        if (rows.pieces > 1) merge<T>(call, rows, kept + std::ptrdiff_t(i) * most * piece, piece);
      }
    }
    mine->form.leave();
  }
}

}  // namespace
}  // namespace regrow

// q [batch, heads, n, dim], k [batch, kv_heads, cells, dim], v [batch, kv_heads, cells, value_dim], bfloat16 or float32,
// with strides in elements for batch, head and token or cell, dims side by side; runs int32 [2, batch, n]: query i sees
// the cells [runs[0], runs[1]). shape: batch, n, heads, kv_heads, dim, value_dim, cells.
// out [batch, n, heads, value_dim]. lent: null, or cells of the one row there is, which all its queries see; they are
// in k and v afterwards. Returns 1 where it does nothing: runs leave the cells, heads do not divide or are too large.
REGROW_API int regrow_attention(const void* q, const void* k, const void* v, void* out, const std::int32_t* runs,
                                const std::int64_t* strides, const std::int32_t* shape, float scale, int is_bf16,
                                const regrow::Lent* lent) {
  using namespace regrow;
  Call call{};
  call.q = q, call.k = k, call.v = v, call.out = out, call.scale = scale, call.lent = lent;
  call.q_at = {strides[0], strides[1], strides[2]};
  call.k_at = {strides[3], strides[4], strides[5]};
  call.v_at = {strides[6], strides[7], strides[8]};
  call.batch = shape[0], call.n = shape[1], call.heads = shape[2], call.kv_heads = shape[3];
  call.dim = shape[4], call.value_dim = shape[5], call.cells = shape[6];
  call.first = runs, call.end = runs + std::ptrdiff_t(call.batch) * call.n;
  if (!call.served()) return 1;
#ifdef REGROW_TILES
  if (is_bf16 && tiles_allowed()) {
    run<Tiles>(call);
    return 0;
  }
#endif
  if (is_bf16) {
    run<Plain<bf16>>(call);
  } else {
    run<Plain<float>>(call);
  }
  return 0;
}
