"""Writes tiny GGUF files from random models, and reads them the slow way, for comparison."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import gguf
import torch
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from tests.models.dialects import CHATML, MERGES

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*ALPHABET, *("".join(pair) for pair in MERGES), *CHATML.specials]
SHAPE = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def tiny(model_type: str, tied: bool = False, **more: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE | more, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    without: str = "",
    pre: str = "default",
    extra: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> Path:
    """Write the model's tensors under GGUF names, matrices as `kind`.

    without: tensors whose names begin so are left out. extra(writer) adds metadata.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(12345.0)
    add_tokenizer(writer, pre)
    extra(writer)
    table = gguf.get_tensor_name_map(
        next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config.num_hidden_layers,
    )
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        if (tied and name == "lm_head.weight") or (without and found.startswith(without)):
            continue
        values = tensor.numpy()
        raw = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(found, quantize(values, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama_cpp(
    path: Path, model: PreTrainedModel, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
) -> Path:
    """Write a llama model as llama.cpp stores it: the two halves of each query and key head interleaved."""
    stored = deepcopy(model)
    for layer in stored.model.layers:
        attention, config = layer.self_attn, stored.config
        for projection, heads in (
            (attention.q_proj, config.num_attention_heads),
            (attention.k_proj, config.num_key_value_heads),
        ):
            rows = projection.weight.data
            halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1)
            projection.weight.data = halves.transpose(1, 2).reshape(rows.shape)
    return write_gguf(path, stored, "llama", kind)


def write_lfm2(
    path: Path, model: PreTrainedModel, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
) -> Path:
    """Write a hybrid of short convolutions and attention."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.embedding_norm": "token_embd_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "operator_norm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
        "conv.conv": "shortconv.conv",
    }
    config = model.config
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([0, config.num_key_value_heads])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    add_tokenizer(writer, "default")
    for name, tensor in model.state_dict().items():
        for long, short in names.items():
            name = name.replace(long, short)
        values = tensor.squeeze(1).numpy() if tensor.ndim == 3 else tensor.numpy()
        raw = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_slowly(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load as transformers itself does."""
    logging.set_verbosity_error()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)


def read_tokenizer_slowly(path: Path) -> Tokenizer:
    backend: Tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    return backend


def original_tokenizer() -> Tokenizer:
    core = Tokenizer(BPE({token: i for i, token in enumerate(TOKENS)}, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(CHATML.specials)
    return core


def add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    control = len(TOKENS) - len(CHATML.specials)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * control + [3] * len(CHATML.specials))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(len(TOKENS) - 1)
    writer.add_eot_token_id(len(TOKENS) - 2)
    writer.add_bos_token_id(control)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML.template)
