"""Families that nothing here was written for: the same code serves them, checked as the others are."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from regrow.gpu.runner import ModelRunner
from regrow.gpu.types import Geometry
from regrow.models.random_models import random_model
from tests.gpu.drive import SLOTS, answer, follow, greedy_of, plan_of, poison, prompt, read, row

BASE = {
    "vocab_size": 512,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 64}
MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
DELTA = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_chunk_size": 16}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 64, "qk_nope_head_dim": 48}

CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": {**HEAD, "sliding_window": 40},
    "qwen3": HEAD,
    "qwen3_moe": {**HEAD, **MOE},
    "qwen3_next": {**HEAD, **MOE, **DELTA},
    "qwen4_exp_text": {
        **HEAD,
        **MOE,
        **DELTA,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
        "hc_count": 2,
        "hc_lowrank": 16,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 1000,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_linear": {
        **LATENT,
        "num_key_value_heads": 6,
        "moe_intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": 64,
        "linear_num_heads": 4,
    },
    "nemotron_h": {
        **HEAD,
        "num_hidden_layers": None,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 64,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "moe_latent_size": None,
    },
    "llama4_text": {
        **HEAD,
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "attention_chunk_size": 40,
    },
    "deepseek_v3": {
        **LATENT,
        "num_key_value_heads": 6,
        "q_lora_rank": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
LENGTHS = (87, 150, 33)
STEPS = 12


def model(family: str) -> Any:
    settings = {name: value for name, value in {**BASE, **CONFIGS[family]}.items() if value is not None}
    return random_model(AutoConfig.for_model(family, **settings), torch.float32)


@cache
def runner(family: str) -> ModelRunner:
    return ModelRunner(model(family), SLOTS, 256, "full")


@pytest.mark.parametrize("family", CONFIGS)
def test_chunks_ragged_rows_and_resumes_agree_with_the_stock_model(family: str) -> None:
    served, reference = runner(family), model(family)
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


@pytest.mark.parametrize("family", CONFIGS)
def test_a_resume_beside_another_row_equals_reading_straight_through(family: str) -> None:
    served, ids, plan = runner(family), prompt(131), plan_of(131, (37,))
    served.reset()
    poison(served)
    kept = read(served, 2, ids, plan)
    wanted = answer(served, 2, ids, 4)
    read(served, 0, prompt(140), plan_of(140))
    served.join(0)
    for cut in (128, 37):
        served.mount(2, cut, kept[cut])
        read(served, 2, ids, plan, cut)
        assert answer(served, 2, ids, 4, lambda: [row(served, 0, 65)]).same_as(wanted)


def test_positional_tensors_beyond_keys_and_values_are_cells() -> None:
    assert cells(runner("qwen4_exp_text").geometry) == {"k", "v", "indexer", "positions"}
    assert cells(runner("lfm2").geometry) == {"k", "v"}


def cells(geometry: Geometry) -> set[str]:
    return {cell.name for cell in geometry.cells}


def test_only_families_that_attend_over_what_they_stored_are_row_exact() -> None:
    assert [f for f in CONFIGS if not runner(f).row_exact] == ["kimi_linear", "deepseek_v3"]
