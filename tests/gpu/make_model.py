"""Writes a llama-shaped model of random bfloat16 weights, 1.2 billion parameters or a few, and a copy with weights of 4 bits.

    python make_model.py large|tiny FOLDER [--quantized FOLDER]

The same call writes the same weights on one kind of device. For measuring speed, where what the model says does not matter.
"""

import argparse
import json
from pathlib import Path

import mlx.core as mx

SHAPES = {
    "large": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "vocab_size": 2048,
    },
}
GROUP_SIZE, BITS = 64, 4


def config(shape):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def weights(shape):
    """Matrices (outputs, inputs) of deviation 0.02 by Hugging Face's names; the scales of the norms are 1."""
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head

    def random(outputs, inputs):
        return (mx.random.normal((outputs, inputs)) * 0.02).astype(mx.bfloat16)

    mx.random.seed(0)
    tensors = {"model.embed_tokens.weight": random(shape["vocab_size"], hidden)}
    for layer in range(shape["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        tensors[name + "self_attn.q_proj.weight"] = random(queries, hidden)
        tensors[name + "self_attn.k_proj.weight"] = random(keys, hidden)
        tensors[name + "self_attn.v_proj.weight"] = random(keys, hidden)
        tensors[name + "self_attn.o_proj.weight"] = random(hidden, queries)
        tensors[name + "mlp.gate_proj.weight"] = random(inner, hidden)
        tensors[name + "mlp.up_proj.weight"] = random(inner, hidden)
        tensors[name + "mlp.down_proj.weight"] = random(hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{norm}.weight"] = mx.ones((hidden,), mx.bfloat16)
    tensors["model.norm.weight"] = mx.ones((hidden,), mx.bfloat16)
    return tensors


def quantized(tensors):
    """Each matrix as packed weights, scales and biases, the embedding among them."""
    packed = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            packed[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        parts = mx.quantize(tensor, group_size=GROUP_SIZE, bits=BITS)
        packed |= {f"{stem}.{kind}": part for kind, part in zip(("weight", "scales", "biases"), parts)}
    return packed


def save(folder, tensors, settings):
    folder.mkdir(parents=True, exist_ok=True)
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "pt"})
    # Last: a folder with it is whole.
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quantized", type=Path)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    tensors = weights(shape)
    save(args.folder, tensors, config(shape))
    if args.quantized:
        settings = {"group_size": GROUP_SIZE, "bits": BITS}
        save(args.quantized, quantized(tensors), config(shape) | {"quantization": settings, "quantization_config": settings})
    count = sum(tensor.size for tensor in tensors.values())
    print(f"made {args.folder}: {count / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
