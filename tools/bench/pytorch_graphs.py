"""Times the blocks of tools/bench/block_stack.h as PyTorch's own graphed callables, beside PyTorch's eager steps.

Usage: pytorch_graphs.py [--tokens 8192] [--layers 12] [--rounds 8] [--transformer-engine] [--report FILE]

Forward and backward, no optimizer. Modes take turns, and each is timed with gradients that are unset before a step and with gradients that
the step adds to. Needs PyTorch with CUDA, and with --transformer-engine also the package transformer_engine, whose graphed callables then
take turns with the others. bench_layers times ours: `--modes "graphs,graphs owned"`, with and without `--unset-gradients`.
"""
import argparse
import functools
import json
import pathlib
import statistics
import time

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

HIDDEN, HEADS, KV_HEADS, FFN = 4096, 32, 8, 14336
DIM = HIDDEN // HEADS
WATCHED_STEPS = 3


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()

        def weight(*sizes):
            return torch.nn.Parameter(torch.randn(*sizes, device="cuda", dtype=torch.bfloat16) * 0.02)

        self.norm1 = torch.nn.Parameter(torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16))
        self.norm2 = torch.nn.Parameter(torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16))
        self.qkv = weight(HIDDEN + 2 * KV_HEADS * DIM, HIDDEN)
        self.proj = weight(HIDDEN, HIDDEN)
        self.fc1 = weight(2 * FFN, HIDDEN)
        self.fc2 = weight(HIDDEN, FFN)

    def forward(self, x):
        batch, tokens, _ = x.shape
        parts = linear(torch.rms_norm(x, (HIDDEN,), self.norm1, 1e-6), self.qkv).split(
            [HIDDEN, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        q, k, v = (part.view(batch, tokens, -1, DIM).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        residual = x + linear(attended.transpose(1, 2).reshape(batch, tokens, HIDDEN), self.proj)
        gate, up = linear(torch.rms_norm(residual, (HIDDEN,), self.norm2, 1e-6), self.fc1).chunk(2, -1)
        return residual + linear(silu(gate) * up, self.fc2)


def transformer_engine_graphs(blocks, samples):
    """Both ways of TransformerEngine to return a weight's gradient: as a copy, and as the memory that the next replay overwrites."""
    from transformer_engine.pytorch.graph import make_graphed_callables

    def make(cloned):
        return make_graphed_callables(tuple(blocks), samples(), clone_param_grads_on_return=cloned, _order=[1, -1],
                                      _num_layers_per_chunk=[len(blocks)], _reuse_graph_input_output_buffers=True)
    return {"TransformerEngine": make(True), "TransformerEngine, not cloned": make(False)}


def measure(tokens, layers, rounds, with_transformer_engine):
    torch.manual_seed(1)
    blocks = [Block() for _ in range(layers)]
    x = torch.randn(1, tokens, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x) * 1e-2

    def samples():
        return tuple((torch.randn_like(x).requires_grad_(),) for _ in blocks)

    # Each way of graphs gives the blocks another forward.
    calls = {"eager": [functools.partial(Block.forward, block) for block in blocks]}
    made = transformer_engine_graphs(blocks, samples) if with_transformer_engine else {}
    made["graphs"] = torch.cuda.make_graphed_callables(tuple(blocks), samples())
    calls.update(made)
    parameters = [parameter for block in blocks for parameter in block.parameters()]

    def step(way, unset):
        if unset:
            for parameter in parameters:
                parameter.grad = None
        torch.cuda.synchronize()
        began = time.perf_counter()
        h = x
        for call in calls[way]:
            h = call(h)
        h.backward(gradient)
        torch.cuda.synchronize()
        x.grad = None
        return (time.perf_counter() - began) * 1e3

    modes = {f"{way}, {gradients}": (way, gradients == "unset") for gradients in ("unset", "added") for way in calls}
    modes.pop("TransformerEngine, not cloned, added", None)  # would add a gradient to itself
    names = list(modes)
    for mode in modes.values():
        for _ in range(4):
            step(*mode)
    times = {name: [] for name in names}
    for turn in range(rounds * len(names)):
        name = names[(turn + turn // len(names)) % len(names)]
        step(*modes[name])
        times[name].append(statistics.median(step(*modes[name]) for _ in range(WATCHED_STEPS)))
    return {"benchmark": "PyTorch's graphed callables", "torch": torch.__version__,
            "device": torch.cuda.get_device_name(), "tokens": tokens, "layers": layers, "rounds": rounds,
            "modes": [{"name": name, "step_ms_median": round(statistics.median(times[name]), 2),
                       "step_ms_lowest": round(min(times[name]), 2), "step_ms_highest": round(max(times[name]), 2)}
                      for name in names]}


def main():
    parser = argparse.ArgumentParser(description="Times transformer layers as PyTorch's own graphed callables.")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--report", type=pathlib.Path, help="write JSON here")
    parser.add_argument("--transformer-engine", action="store_true", help="measure TransformerEngine's graphed callables too")
    asked = parser.parse_args()
    result = measure(asked.tokens, asked.layers, asked.rounds, asked.transformer_engine)
    for mode in result["modes"]:
        print(f"{mode['name']:<38}{mode['step_ms_median']:>8.2f} ms ({mode['step_ms_lowest']:.2f}-{mode['step_ms_highest']:.2f})")
    if asked.report:
        asked.report.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
