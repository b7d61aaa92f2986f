"""The shapes of random models: real architectures, made small.

The shapes are chosen so that tests can fail: head dim 64, three queries a key head, every kind of layer at
least once, windows and budgets that a prompt of a hundred tokens outgrows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig

from regrow.models.byte_tokenizer import END_OF_TEXT, IM_END

CONTEXT = 32_768

Size = Literal["tiny", "135m"]
_Settings = Mapping[str, Any]

_BOTH: _Settings = {
    "max_position_embeddings": CONTEXT,
    "pad_token_id": END_OF_TEXT,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
    "tie_word_embeddings": False,
    "head_dim": 64,
}
_SIZES: Mapping[Size, _Settings] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
    },
    "135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "num_hidden_layers": 22,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
    },
}


@dataclass(frozen=True, slots=True)
class Family:
    """The settings of one family, beside those that all share; None takes a shared one away.

    model_type: what `transformers` calls it. both, tiny, m135: settings of both sizes and of each. A list of
    `layer_types` is repeated over all layers.
    """

    model_type: str
    both: _Settings = field(default_factory=dict)
    tiny: _Settings = field(default_factory=dict)
    m135: _Settings = field(default_factory=dict)

    def config(self, size: Size) -> PreTrainedConfig:
        """Return the `transformers` configuration of that size."""
        own = self.tiny if size == "tiny" else self.m135
        settings = {**_BOTH, **_SIZES[size], **self.both, **own}
        if "layer_types" in settings:
            settings["layer_types"] = list(
                islice(cycle(settings["layer_types"]), settings["num_hidden_layers"])
            )
        return AutoConfig.for_model(
            self.model_type, **{name: value for name, value in settings.items() if value is not None}
        )


def _mrope(sections: list[int], share: float) -> _Settings:
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": sections,
            "mrope_interleaved": True,
            "partial_rotary_factor": share,
        }
    }


def _delta(heads: int) -> _Settings:
    """A gated delta net: `heads` key heads of 64, twice as many value heads."""
    return {
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": 2 * heads,
    }


def _experts(width: int) -> _Settings:
    return {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }


_LINEAR = ("linear_attention", "full_attention")
_LINEAR_3 = ("linear_attention", "linear_attention", "linear_attention", "full_attention")

FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama"),
    "mistral": Family("mistral", {}, {"num_hidden_layers": 2, "sliding_window": 40}, {"sliding_window": 512}),
    "gemma3": Family(
        "gemma3_text",
        {"query_pre_attn_scalar": 64, "layer_types": ("sliding_attention", "full_attention")},
        {"num_hidden_layers": 2, "sliding_window": 48},
        {"sliding_window": 512},
    ),
    "qwen3": Family("qwen3", {}, {"num_hidden_layers": 2}),
    "qwen3_moe": Family(
        "qwen3_moe",
        {},
        {"num_hidden_layers": 2, **_experts(64)},
        {"num_hidden_layers": 16, **_experts(256)},
    ),
    "qwen3_5": Family(
        "qwen3_5_text",
        _mrope([4, 2, 2], 0.25),
        {**_delta(2), "layer_types": _LINEAR},
        {**_delta(4), "layer_types": _LINEAR_3, "num_hidden_layers": 20},
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {},
        {**_delta(2), **_experts(64), "num_hidden_layers": 2, "layer_types": _LINEAR},
        {**_delta(4), **_experts(256), "num_hidden_layers": 12, "layer_types": _LINEAR_3},
    ),
    "qwen4_exp": Family(
        "qwen4_exp_text",
        {
            **_mrope([8, 4, 4], 0.5),
            "hc_count": 2,
            "hc_lowrank": 16,
            "ple_embed_dim": 32,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 1000,
            "split_ngram_parts": 2,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 64,
            "indexer_compress_ratio": 4,
        },
        {
            **_delta(2),
            **_experts(64),
            "num_hidden_layers": 3,
            "layer_types": ("linear_attention", "indexed_attention"),
            "ple_layer_ids": [3],
            "indexer_budget": 16,
        },
        {
            **_delta(4),
            **_experts(256),
            "num_hidden_layers": 12,
            "layer_types": ("linear_attention", "linear_attention", "linear_attention", "indexed_attention"),
            "ple_layer_ids": [2],
            "indexer_budget": 1024,
        },
    ),
    "lfm2": Family(
        "lfm2",
        {"layer_types": ("conv", "full_attention"), "head_dim": None},
        {"num_hidden_layers": 3},
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {"mamba_d_head": 64, "mamba_chunk_size": 64},
        {"mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_d_state": 32, "num_hidden_layers": 2},
        {"mamba_d_ssm": 768, "mamba_n_heads": 12, "mamba_d_state": 128, "num_hidden_layers": 16},
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {"head_dim": None, "mamba_d_head": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            "num_hidden_layers": 2,
            "layer_types": ("mamba", "attention"),
            "intermediate_size": 64,
            "shared_intermediate_size": 128,
            "mamba_n_heads": 6,
            "mamba_d_state": 32,
            "mamba_chunk_size": 64,
        },
        {
            "num_hidden_layers": 12,
            "layer_types": ("mamba", "mamba", "mamba", "attention"),
            "intermediate_size": 384,
            "shared_intermediate_size": 768,
            "mamba_n_heads": 18,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
        },
    ),
    "kimi_linear": Family(
        "kimi_linear",
        {
            "head_dim": None,
            "v_head_dim": 64,
            "qk_nope_head_dim": 48,
            "qk_rope_head_dim": 16,
            "linear_head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 6,
            "layer_types": _LINEAR,
            "kv_lora_rank": 32,
            "linear_num_heads": 3,
            "moe_intermediate_size": 64,
        },
        {
            "num_hidden_layers": 12,
            "num_key_value_heads": 9,
            "layer_types": _LINEAR_3,
            "kv_lora_rank": 128,
            "linear_num_heads": 9,
            "moe_intermediate_size": 256,
        },
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {
            "mamba_head_dim": 64,
            "n_groups": 2,
            "chunk_size": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_latent_size": None,
        },
        {
            "num_hidden_layers": 5,
            "layer_types": ("linear_attention", "moe", "full_attention", "linear_attention", "mlp"),
            "mamba_num_heads": 6,
            "ssm_state_size": 32,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
        },
        {
            "num_hidden_layers": 24,
            "layer_types": ("linear_attention", "moe", "linear_attention", "mlp", "full_attention", "moe"),
            "mamba_num_heads": 18,
            "ssm_state_size": 128,
            "moe_intermediate_size": 384,
            "moe_shared_expert_intermediate_size": 384,
        },
    ),
    "olmo_hybrid": Family(
        "olmo_hybrid",
        {"head_dim": None},
        {**_delta(2), "num_hidden_layers": 2, "layer_types": _LINEAR},
        {**_delta(4), "num_hidden_layers": 20, "layer_types": _LINEAR_3},
    ),
}
