from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.policy.directory import NEWEST, Directory, Holder, HolderId, HolderKind
from regrow.policy.keys import Keys, Namespace, as_keys, common_prefix, prefix_hashes
from regrow.policy.plan import ChunkTable, MessageMarks, build_plan
from regrow.policy.request import Exactness
from regrow.policy.resume import resume_point
from tests.policy.chats import NAMESPACE, chat, hashed, plan_of

KINDS: tuple[HolderKind, ...] = ("slot", "root", "parked", "disk")


def holder(
    keys: Keys,
    key: int = 0,
    kind: HolderKind = "slot",
    namespace: Namespace = NAMESPACE,
    pure: int | None = None,
) -> Holder:
    return Holder(
        HolderId(kind, key),
        length=len(keys),
        cuts=hashed(keys, plan_of(keys), namespace),
        pure_length=len(keys) if pure is None else pure,
    )


def state_at(keys: Keys, *positions: int) -> tuple[bytes, ...]:
    """The names of the running states at `positions` of this prompt."""
    return prefix_hashes(NAMESPACE, keys, positions)


branchy = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(
    lambda bits: as_keys([bit for bit in bits for _ in range(64)] + [9])
)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(branchy, st.sampled_from(range(0, 400, 32))), max_size=5),
    st.none() | st.lists(st.tuples(branchy, st.sampled_from(range(64, 400, 64))), max_size=6),
    branchy,
    st.sampled_from(["full", "cache", "off"]),
)
def test_r1_a_lookup_finds_what_comparing_the_keys_would(
    held: list[tuple[Keys, int]],
    kept: list[tuple[Keys, int]] | None,
    prompt: Keys,
    exact: Exactness,
) -> None:
    directory, marks = Directory(hybrid=kept is not None), MessageMarks()
    plan = build_plan(prompt, ChunkTable.uniform(64), marks)
    states = [(keys[:position], position) for keys, position in kept or () if position < len(keys)]
    directory.states_changed([state_at(*state)[0] for state in states], ())
    for i, (keys, pure) in enumerate(held):
        cuts = hashed(keys, build_plan(keys, ChunkTable.uniform(64), marks))
        directory.update(Holder(HolderId("slot", i), len(keys), cuts, pure))
    found = {match.holder.id.key: match for match in directory.lookup(hashed(prompt, plan), exact)}
    for i, (keys, pure) in enumerate(held):
        shared = common_prefix(keys, prompt)
        known = plan.last_cut_at_or_below(min(shared, len(prompt) - 1, len(keys) - 1))
        there = {p for state, p in states if common_prefix(keys, state) == p}
        if kept is None:
            expected = plan.last_cut_at_or_below(known if exact == "off" else min(known, pure))
        else:
            expected = resume_point(plan, known, pure, there, exact)
        assert (found[i].position, found[i].known) == (expected, known) if known else i not in found
        if i in found:
            own = build_plan(keys, ChunkTable.uniform(64), marks).cuts if kept is None else there
            assert found[i].deepest == max((p for p in own if exact == "off" or p <= pure), default=0)
        if i in found and expected:
            others = [k for j, (k, _) in enumerate(held) if j != i and len(k) > expected]
            assert found[i].shared == any(common_prefix(k, prompt) >= expected for k in others)


def test_case_4_holders_rank_by_usable_tokens_not_by_the_longest_common_prefix() -> None:
    prompt = chat(("system", 100), ("user", 300), ("assistant", 40), ("user", 5))
    plan = plan_of(prompt)
    directory = Directory(hybrid=True)
    directory.update(holder(prompt, 0, pure=90))
    directory.update(holder(prompt[:300], 1))
    directory.states_changed(state_at(prompt, plan.ends[0].position), ())
    best, longest = directory.lookup(hashed(prompt, plan), "full")
    assert (best.holder.id.key, best.position) == (1, plan.ends[0].position)
    assert (longest.holder.id.key, longest.position, longest.known) == (0, 0, plan.cuts[-1])


def test_case_3_the_same_system_prompt_is_found_in_every_slot_and_tier_that_holds_it() -> None:
    directory = Directory(hybrid=True)
    first = chat(("system", 200), ("user", 5))
    end = plan_of(first).ends[0].position
    directory.states_changed(state_at(first, end), ())
    for kind in KINDS:
        directory.update(holder(first, 0, kind))
    prompt = chat(("system", 200), ("user", 9))
    found = directory.lookup(hashed(prompt, plan_of(prompt)), "full")
    assert {(m.holder.id.kind, m.position) for m in found} == {(kind, end) for kind in KINDS}


def test_case_3_a_state_serves_every_holder_of_its_cells_whoever_made_it() -> None:
    directory = Directory(hybrid=True)
    first, second = chat(("system", 200), ("user", 5)), chat(("system", 200), ("user", 9))
    end = plan_of(first).ends[0].position
    directory.update(holder(second, 1))
    assert directory.lookup(hashed(first, plan_of(first)), "full")[0].position == 0
    directory.states_changed(state_at(first, end), ())
    assert directory.lookup(hashed(first, plan_of(first)), "full")[0].position == end


def test_case_5_without_the_deepest_state_the_next_one_is_found_and_without_any_none_is() -> None:
    directory = Directory(hybrid=True)
    keys = chat(("system", 200), ("user", 90), ("assistant", 20), ("user", 5))
    plan = plan_of(keys)
    one, two = plan.ends[0].position, plan.ends[1].position
    directory.update(holder(keys))
    directory.states_changed(state_at(keys, one, two), ())
    cuts = hashed(keys, plan)
    assert directory.lookup(cuts, "full")[0].position == two
    directory.states_changed((), state_at(keys, two))
    match = directory.lookup(cuts, "full")[0]
    assert (match.position, match.known, match.deepest) == (one, plan.cuts[-1], one)
    directory.states_changed((), state_at(keys, one))
    match = directory.lookup(cuts, "full")[0]
    assert (match.position, match.known, match.deepest) == (0, plan.cuts[-1], 0)


def test_case_11_a_state_whose_cells_nobody_holds_is_no_match() -> None:
    directory = Directory(hybrid=True)
    keys = chat(("system", 200), ("user", 5))
    directory.states_changed(state_at(keys, *plan_of(keys).cuts), ())
    assert directory.lookup(hashed(keys, plan_of(keys)), "full") == ()


def test_r3_a_holder_of_another_namespace_is_never_found() -> None:
    directory = Directory(hybrid=False)
    keys = chat(("system", 200), ("user", 5))
    directory.update(holder(keys, namespace=NAMESPACE.salted("somebody else")))
    assert directory.lookup(hashed(keys, plan_of(keys)), "full") == ()


def test_r5_decoded_positions_are_found_in_mode_off_only() -> None:
    directory = Directory(hybrid=False)
    keys = chat(("system", 200), ("user", 5))
    plan = plan_of(keys)
    directory.update(holder(keys, pure=100))
    cuts = hashed(keys, plan)
    assert directory.lookup(cuts, "full")[0].position == 64
    assert directory.lookup(cuts, "off")[0].position == plan.cuts[-1]


def test_a_root_is_not_a_conversation_that_shares_a_prefix() -> None:
    directory = Directory(hybrid=False)
    keys = chat(("system", 200), ("user", 5))
    directory.update(holder(keys, 0, "slot"))
    directory.update(holder(keys, 0, "root"))
    cuts = hashed(keys, plan_of(keys))
    shared = {m.holder.id.kind: m.shared for m in directory.lookup(cuts, "full")}
    assert shared == {"slot": False, "root": True}
    directory.update(holder(keys, 0, "parked"))
    assert all(m.shared for m in directory.lookup(cuts, "full"))


def test_without_the_cache_only_what_the_slots_hold_is_known_and_no_state_is() -> None:
    keys = chat(("system", 200), ("user", 5))
    cuts = hashed(keys, plan_of(keys))
    for hybrid in (False, True):
        directory = Directory(hybrid=hybrid)
        for kind in KINDS:
            directory.update(holder(keys, 0, kind))
        directory.states_changed(state_at(keys, *plan_of(keys).cuts), ())
        directory.forget_kept()
        (left,) = directory.lookup(cuts, "full")
        assert left.holder.id == HolderId("slot", 0)
        assert (left.position > 0) == (not hybrid)


def test_an_update_replaces_all_that_was_known_of_a_holder() -> None:
    directory = Directory(hybrid=False)
    old, new = chat(("system", 200), ("user", 5)), chat(("user", 90))
    directory.update(holder(old, 3))
    changed = holder(new, 3)
    directory.update(changed)
    assert len(directory) == 1
    assert directory.get(HolderId("slot", 3)) == changed
    assert directory.lookup(hashed(old, plan_of(old)), "full") == ()
    assert directory.lookup(hashed(new, plan_of(new)), "full")[0].holder == changed


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.sampled_from(KINDS), branchy), max_size=20))
def test_a_forgotten_holder_leaves_nothing_behind(
    changes: list[tuple[bool, int, HolderKind, Keys]],
) -> None:
    directory, fresh = Directory(hybrid=False), Directory(hybrid=False)
    kept: dict[HolderId, Holder] = {}
    for remove, key, kind, keys in changes:
        changed = holder(keys, key, kind)
        if remove:
            directory.remove(changed.id)
            kept.pop(changed.id, None)
        else:
            directory.update(changed)
            kept[changed.id] = changed
    for left in kept.values():
        fresh.update(left)
    assert len(directory) == len(kept)
    for _, _, _, keys in changes:
        cuts = hashed(keys, plan_of(keys))
        one, other = (
            {(m.holder.id, m.position, m.known, m.shared) for m in d.lookup(cuts, "full")}
            for d in (directory, fresh)
        )
        assert one == other
    for left_id in kept:
        directory.remove(left_id)
    assert len(directory) == 0
    assert all(directory.lookup(hashed(k, plan_of(k)), "full") == () for _, _, _, k in changes)


class CountedHash(bytes):
    """A prefix hash that counts how often it is looked up."""

    probes = 0

    def __hash__(self) -> int:
        CountedHash.probes += 1
        return super().__hash__()


class Watched(Directory):
    """A directory that counts how often it asks itself for a state."""

    asked = 0

    def has_state(self, holder: Holder, prefix: bytes) -> bool:
        self.asked += 1
        return super().has_state(holder, bytes(prefix))


def test_s0_among_2000_holders_a_lookup_probes_the_prompts_cuts_once_each() -> None:
    directories = [Watched(hybrid=hybrid) for hybrid in (False, True)]
    for i in range(2000):
        keys = chat(("system", 300), ("user", 40, i), ("assistant", 150), ("user", 5))
        told = holder(keys, i, "slot" if i < 4 else "parked")
        for directory in directories:
            directory.update(told)
            directory.states_changed([told.cuts[-1][1]], ())
    prompt = chat(("system", 300), ("user", 40, 1999), ("assistant", 150), ("user", 5))
    plan = plan_of(prompt)
    cuts = [(position, CountedHash(key)) for position, key in hashed(prompt, plan)]
    for directory in directories:
        CountedHash.probes = 0
        found = directory.lookup(cuts, "full")
        assert CountedHash.probes == len(cuts)
        assert directory.asked <= len(cuts) * (4 + NEWEST)
        assert (found[0].holder.id.key, found[0].position) == (1999, plan.cuts[-1])
        assert {m.holder.id.key for m in found if m.holder.id.kind == "slot"} == {0, 1, 2, 3}
