"""Writes a Gemma 4 of random bfloat16 weights, both towers at full size: for measuring speed, where what it says does not matter.

    python random_gemma4.py e2b|small FOLDER

`e2b` has the sizes of Gemma 4 E2B (5 billion parameters, half of them per-layer embeddings); `small` its towers beside a text model
of a few layers, for a CPU. Layout and names are those of fixtures/make_gemma4.py, which must be in the path.
"""

import argparse
import json
from pathlib import Path

import make_gemma4 as tiny
import mlx.core as mx

# As in Google's E2B: the defaults of transformers' configuration_gemma4.py.
E2B_LAYERS = ([tiny.SLIDING] * 4 + [tiny.FULL]) * 7
E2B = {
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_hidden_layers": 35,
    "layer_types": E2B_LAYERS,
    "num_kv_shared_layers": 20,
    "hidden_size_per_layer_input": 256,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "sliding_window": 512, "max_position_embeddings": 8192}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "global_head_dim": 64,
    "position_embedding_size": 10240,
    "default_output_length": 280,
}
AUDIO = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "subsampling_conv_channels": [128, 32],
    "output_proj_dims": 1536,
}


class Weights(tiny.Weights):
    """Drawn by MLX, on its device."""

    def __init__(self):
        super().__init__("random")

    def normal(self, name, shape, scale, center=0.0):
        self.tensors[name] = (mx.random.normal(shape) * scale + center).astype(mx.bfloat16)
        mx.eval(self.tensors[name])

    def divide_rows(self, name, rows, by):
        """What is drawn as a token does not matter here."""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=["e2b", "small"])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    text = tiny.E2B_TEXT | (E2B if args.shape == "e2b" else SMALL)
    vision, audio = tiny.VISION | VISION, tiny.AUDIO | AUDIO
    config, _ = tiny.whole(text, vision, audio, 280)
    mx.random.seed(0)
    weights = Weights()
    tiny.language(weights, text, "model.language_model")
    tiny.vision_tower(weights, vision, text["hidden_size"])
    tiny.audio_tower(weights, audio, text["hidden_size"])
    args.folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(args.folder / "model.safetensors"), weights.tensors, metadata={"format": "pt"})
    # Last: a folder with it is whole.
    (args.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"made {args.folder}: {sum(tensor.size for tensor in weights.tensors.values()) / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
