"""Probing: what a model keeps is found by running it, also for one that this code has never seen."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regrow.errors import ModelRefused
from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import CellSpec, Chunk, Geometry, StateSpec
from regrow.models.random_models import build_random
from regrow.policy.keys import Keys
from tests.gpu.drive import SLOTS, answer, follow, plan_of, poison, prompt, read, row

HIDDEN, HEADS, DIM = 48, 3, 16


class OddConfig(PreTrainedConfig):
    """flaws: "amnesia" drops the state between chunks, "private" keeps it where the cache does not see it,
    "copies" makes layers of the cache of its own, "fickle" reads single tokens otherwise than chunks,
    "softcap" asks attention for what it cannot do, "reshaped" hands attention other keys than the cache gave,
    "gathered" computes each of two experts over the rows that chose it."""

    model_type = "regrow_odd"

    def __init__(self, flaws: tuple[str, ...] = (), **kwargs: Any) -> None:
        self.flaws = flaws
        self.hidden_size = HIDDEN
        self.num_hidden_layers = 3
        self.vocab_size = 256
        super().__init__(**kwargs)


class OddMemory(nn.Module):
    """A decaying average [batch, 2, hidden] kept as state number 3, and the last two token ids as a conv
    state of integers; the average is updated in place in single steps."""

    def __init__(self, config: OddConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.flaws = layer, config.flaws
        self.kept: torch.Tensor | None = None
        self.ids = nn.Embedding(256, HIDDEN)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        n = ids.shape[1]
        before = cache.update_conv_state(ids[:, None], self.layer, state_idx=1, conv_kernel_size=2)
        before = nn.functional.pad(before, (max(0, n + 2 - before.shape[-1]), 0))[:, 0, -n - 2 : -2]
        state = cache.get_recurrent_state(self.layer, state_idx=3)
        if "amnesia" in self.flaws and n > 1:
            state = None
        elif "private" in self.flaws:
            state = self.kept
        average = x.new_zeros(len(x), 2, HIDDEN) if state is None else state
        out = []
        for t in range(n):
            rates = x.new_tensor([0.9, 0.5])[None, :, None]
            average = average * rates + x[:, t, None] * (1 - rates)
            out.append(average.sum(1))
        if "private" in self.flaws:
            self.kept = average
        elif state is not None and n == 1:
            state.copy_(average)
        else:
            cache.update_recurrent_state(average, self.layer, state_idx=3)
        return torch.stack(out, 1) + self.ids(before)


class OddAttention(nn.Module):
    def __init__(self, config: OddConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.is_causal, self.num_key_value_groups = config, layer, True, HEADS
        self.qkv = nn.Linear(HIDDEN, DIM * (HEADS + 2), bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, cache: Any) -> torch.Tensor:
        heads = self.qkv(x).view(*x.shape[:2], HEADS + 2, DIM).transpose(1, 2)
        key, value = cache.update(heads[:, HEADS : HEADS + 1], heads[:, HEADS + 1 :], self.layer)
        if "reshaped" in self.config.flaws:
            key = key * 1.0
        extra = {"softcap": 30.0} if "softcap" in self.config.flaws else {}
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        out, _ = attend(self, heads[:, :HEADS], key, value, mask, scaling=0.5, **extra)
        return out.reshape(*x.shape[:2], -1)


def gathered(x: torch.Tensor) -> torch.Tensor:
    """Two experts, the identity and the negation, each computed over the tokens that chose it."""
    out = torch.empty_like(x)
    for sign in (1, -1):
        chosen = x.sum(-1).sign() * sign >= 0
        out[chosen] = x[chosen] * sign
    return out


class OddForCausalLM(PreTrainedModel):
    config_class = OddConfig
    _supports_sdpa = True

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(256, HIDDEN)
        self.layers = nn.ModuleList([OddMemory(config, 0), OddAttention(config, 1), OddMemory(config, 2)])
        self.head = nn.Linear(HIDDEN, 256, bias=False)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, cache: Any, use_cache: bool
    ) -> CausalLMOutputWithPast:
        x = self.embed(input_ids)
        mask = create_causal_mask(self.config, x, None, cache, position_ids)
        if "copies" in self.config.flaws:
            cache.layers = [*cache.layers, deepcopy(cache.layers[0])]
        if "gathered" in self.config.flaws:
            x = gathered(x)
        if "fickle" in self.config.flaws and x.shape[1] == 1:
            x = -x
        for layer in self.layers:
            x = x + layer(
                nn.functional.layer_norm(x, (HIDDEN,)), mask if layer.layer == 1 else input_ids, cache
            )
        return CausalLMOutputWithPast(logits=self.head(nn.functional.layer_norm(x, (HIDDEN,))) * 4)


def odd(*flaws: str) -> OddForCausalLM:
    generator = torch.Generator().manual_seed(4)
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        model = OddForCausalLM(OddConfig(flaws, attn_implementation="sdpa"))
        for parameter in model.parameters():
            parameter.data.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    return model.eval()


def full(model: OddForCausalLM, ids: Keys) -> torch.Tensor:
    """The logits of every token, by the definition of the model, without any cache of ours."""

    class Nothing:
        is_sliding = is_linear = is_dummy = ()

        def update(self, key: torch.Tensor, value: torch.Tensor, _: int) -> tuple[torch.Tensor, torch.Tensor]:
            return key, value

        def update_conv_state(self, new: torch.Tensor, *_: int, **__: int) -> torch.Tensor:
            return new

        def get_recurrent_state(self, *_: int, **__: int) -> None:
            return None

        def update_recurrent_state(self, *_: object, **__: int) -> None:
            return None

        def get_query_offset(self, _: int) -> int:
            return 0

        def get_mask_sizes(self, n: int, _: int) -> tuple[int, int]:
            return n, 0

    tokens = torch.tensor(ids)[None]
    logits: torch.Tensor = model(tokens, torch.arange(len(ids))[None], Nothing(), True).logits[0]
    return logits


def test_a_hybrid_never_seen_before_is_probed_and_served_exactly() -> None:
    reference = odd()
    runner = ModelRunner(odd(), SLOTS, 200, "full")
    assert runner.geometry == Geometry(
        (CellSpec(1, "k", 1, DIM, torch.float32), CellSpec(1, "v", 1, DIM, torch.float32)),
        tuple(
            spec
            for layer in (0, 2)
            for spec in (
                StateSpec(layer, "conv", 1, (1, 2), torch.int64),
                StateSpec(layer, "recurrent", 3, (2, HIDDEN), torch.float32),
            )
        ),
    )
    assert runner.row_exact
    poison(runner)
    ids, plan = prompt(140), plan_of(140, (37, 139))
    wanted = full(reference, ids)
    kept = read(runner, 2, ids[:133], plan_of(133, (37,)))
    logits = follow(runner, 2, ids[132:].tolist())
    assert torch.allclose(logits, wanted[132:], atol=1e-4)
    runner.empty(2)
    read(runner, 2, ids, plan)
    straight = answer(runner, 2, ids, 8)
    assert len(set(straight.tokens)) > 3
    for cut in (37, 64):
        runner.mount(2, cut, kept[cut])
        read(runner, 2, ids, plan, cut)
        assert answer(runner, 2, ids, 8).same_as(straight)


@pytest.mark.parametrize(
    ("flaw", "reason"),
    [
        ("amnesia", "a chunk of several tokens is read without the recurrent state before it"),
        ("private", "there is a state outside of the cache"),
        ("fickle", "read in pieces its logits differ by"),
        ("copies", "layers of the cache are views of the arenas"),
        ("softcap", "attention with softcap is not served"),
    ],
)
def test_a_model_that_would_be_served_wrongly_is_refused_with_the_reason(flaw: str, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        ModelRunner(odd(flaw), SLOTS, 200, "full")


@pytest.mark.parametrize("flaw", ["reshaped", "gathered"])
def test_a_model_whose_rows_could_depend_on_each_other_steps_them_singly(flaw: str) -> None:
    runner = ModelRunner(odd(flaw), SLOTS, 200, "full")
    assert not runner.row_exact
    batches: list[int] = []
    runner._model._model.head.register_forward_hook(lambda _, __, out: batches.append(len(out)))
    lengths = (20, 5, 11)
    for slot, n in enumerate(lengths):
        read(runner, slot, prompt(n), plan_of(n))
        runner.join(slot)
    batches.clear()
    logits = runner.decode([row(runner, slot, int(prompt(n)[-1])) for slot, n in enumerate(lengths)])
    assert batches == [1, 1, 1]
    for slot, n in enumerate(lengths):
        assert torch.allclose(logits[slot], full(odd(flaw), prompt(n))[-1], atol=1e-4)


def test_probing_leaves_the_model_as_good_as_new() -> None:
    model = build_random("qwen3_5")
    first = ModelRunner(model, SLOTS, 64, "full")
    second = ModelRunner(model, SLOTS, 64, "full")
    for runner in (first, second):
        runner.read(Chunk(0, 0, prompt(20)))
    assert first.digest(0) == second.digest(0)
    assert first.geometry == second.geometry
