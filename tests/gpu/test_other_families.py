"""Families without a preset, that nothing here was written for: the same code serves them or refuses them."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from regrow.errors import ModelRefused
from regrow.gpu.probe import probe
from regrow.gpu.runner import ModelRunner
from regrow.models.random_models import random_model
from tests.gpu.drive import SLOTS, answer, follow, greedy_of, plan_of, poison, prompt, read, row

BASE = {
    "vocab_size": 512,
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48,
    "v_head_dim": 64,
}
LINEAR = {"head_dim": 64, "layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

SERVED: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "olmo3": {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "granite": {},
    "gemma4_text": {
        "head_dim": 64,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 512,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 40,
    },
    "mixtral": EXPERTS,
    "glm4_moe": {**EXPERTS, "head_dim": 64},
    "llama4_text": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "attention_chunk_size": 40,
    },
    "deepseek_v3": {**EXPERTS, **LATENT},
    "deepseek_v32": {**EXPERTS, **LATENT, "index_topk": 16, "index_n_heads": 16, "index_head_dim": 32},
    "jetmoe": EXPERTS,
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 6, "mamba_d_head": 64, "mamba_d_state": 16},
    "mamba2": {
        "num_key_value_heads": None,
        "num_heads": 6,
        "head_dim": 64,
        "state_size": 16,
        "n_groups": 1,
    },
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"]},
    "qwen3_5_moe_text": {**EXPERTS, **LINEAR, **DELTA},
    "bailing_hybrid": {**EXPERTS, **LATENT, **LINEAR, "layer_group_size": 2},
}
FORGETS = "a chunk of several tokens is read without the recurrent state before it"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": ({}, "attention with softcap is not served"),
    "gpt_oss": ({**EXPERTS, "head_dim": 64}, "attention with s_aux is not served"),
    "jamba": (
        {
            **EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 16,
        },
        FORGETS,
    ),
    "mamba": ({"num_key_value_heads": None}, FORGETS),
    "recurrent_gemma": ({"num_hidden_layers": 3}, "there is a state outside of the cache"),
    "falcon_mamba": ({"num_key_value_heads": None}, FORGETS),
    "dory": (
        {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
        "layers of the cache are views of the arenas",
    ),
    **{family: ({}, "has an attention of its own") for family in ("bloom", "falcon", "mpt")},
}
LENGTHS = (87, 33)
STEPS = 8


def model(family: str, settings: dict[str, Any]) -> PreTrainedModel:
    given = {name: value for name, value in {**BASE, **settings}.items() if value is not None}
    return random_model(AutoConfig.for_model(family, **given), torch.float32)


@cache
def runner(family: str) -> ModelRunner:
    return ModelRunner(model(family, SERVED[family]), SLOTS, 160, "full")


@pytest.mark.parametrize("family", SERVED)
def test_chunks_ragged_rows_and_resumes_agree_with_the_stock_model(family: str) -> None:
    served, reference = runner(family), model(family, SERVED[family])
    cases = [greedy_of(reference, prompt(n, slot), STEPS) for slot, n in enumerate(LENGTHS)]
    served.reset()
    poison(served)
    kept = {}
    for slot, n in enumerate(LENGTHS):
        kept[slot] = read(served, slot, prompt(n, slot), plan_of(n, (n - 3,)))
        served.join(slot)
    for i in range(STEPS + 1):
        logits = served.decode([row(served, slot, fed[i]) for slot, (fed, _) in enumerate(cases)])
        for slot, (_, wanted) in enumerate(cases):
            served.commit(slot, 1)
            assert torch.allclose(logits[slot], wanted[i], atol=1e-4)
    for slot in range(len(LENGTHS)):
        served.leave(slot)
    for slot, n in enumerate(LENGTHS):
        served.mount(slot, n - 3, kept[slot][n - 3])
        read(served, slot, prompt(n, slot), plan_of(n, (n - 3,)), n - 3)
        fed, wanted = cases[slot]
        assert torch.allclose(follow(served, slot, fed), wanted, atol=1e-4)
        served.leave(slot)


@pytest.mark.parametrize("family", SERVED)
def test_a_resume_beside_another_row_equals_reading_straight_through(family: str) -> None:
    served, ids, plan = runner(family), prompt(100), plan_of(100, (37,))
    served.reset()
    poison(served)
    kept = read(served, 2, ids, plan)
    wanted = answer(served, 2, ids, 3)
    read(served, 0, prompt(140), plan_of(140))
    served.join(0)
    for cut in (64, 37):
        served.mount(2, cut, kept[cut])
        read(served, 2, ids, plan, cut)
        assert answer(served, 2, ids, 3, lambda: [row(served, 0, 65)]).same_as(wanted)


def test_families_that_attend_over_anything_but_what_they_stored_step_their_rows_singly() -> None:
    singly = [family for family in SERVED if not probe(runner(family)._model).row_exact]
    assert singly == ["deepseek_v3", "deepseek_v32", "jetmoe", "bailing_hybrid"]


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_served_right_is_refused_with_the_reason(family: str) -> None:
    settings, reason = REFUSED[family]
    with pytest.raises(ModelRefused, match=reason):
        ModelRunner(model(family, settings), SLOTS, 160, "full")
