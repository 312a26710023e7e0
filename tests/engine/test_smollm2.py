"""The embedded model against transformers on the same file: equal in float32, as close as transformers in bf16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracle import Comparison, Reference, greedy, reference, transformers_reference

from tailrace.kernels.paged_attention import PagedPool, RowSpan, plan_attention
from tailrace.model.decoder import Decoder

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n\nclass Matrix:\n    def __init__(self, rows, columns):",
    "SELECT customer.name, SUM(orders.total) FROM",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at a lower temperature on a mountain because",
    "Q: Which planet is the largest in the solar system?\nA:",
    "Dear Sir or Madam,\n\nI am writing to complain about the",
    "Translate to German: The weather is nice today.\n",
    "La tour Eiffel est un monument situé",
    '{"name": "Alice", "age": 31, "languages": ["English",',
    "To make a simple bread you need flour, water, yeast and salt. First",
    "The three laws of thermodynamics state that",
    "He opened the door slowly. The room was dark, and",
    "Chapter 1\n\nIt was the best of times, it was the worst of times,",
    "<html>\n<head>\n<title>",
    "A recursive function must have a base case; otherwise",
    "x",
    "In 1969 two astronauts walked on the Moon while a third stayed in orbit. Their mission had begun days earlier, "
    "when a rocket taller than a thirty-storey building lifted off from Florida. On the way they " * 3,
]
CHAT = "What is the capital of France?"
PREFIX, TAIL = 96, 48  # tokens prefilled, tokens decoded one by one


@pytest.fixture(scope="module")
def smollm2(smollm2_transformers: Any) -> Reference:
    return reference("smollm2", max_num_tokens=128, num_pages=512)


def test_twenty_prompts_equal_transformers_in_float32(smollm2: Reference, smollm2_transformers: Any):
    oracle = smollm2_transformers(torch.float32)
    prompts = [smollm2.source.tokenizer.encode(text, special=False) for text in PROMPTS]
    assert len(prompts) == 20
    comparison = Comparison()
    for prompt, result in zip(prompts, smollm2.generate(prompts, greedy(64)), strict=True):
        sample = result.samples[0]
        expected = transformers_reference(oracle, prompt, sample.ids)
        comparison.add(expected, sample.ids, [logprob.top for logprob in sample.logprobs])
    comparison.check()


@pytest.mark.parametrize(("chunk", "threads"), [(8, 1), (12, 1), (512, 2)])
@pytest.mark.parametrize("quantized", [False, True])
def test_the_served_weights_answer_the_capital_of_france(smollm2: Reference, quantized: bool, chunk: int, threads: int):
    """Its first word is a near tie, so it is asked of every way to the same logits: other kernels round otherwise."""
    template = smollm2.source.chat_template
    assert template is not None
    text = template.render([{"role": "user", "content": CHAT}], add_generation_prompt=True)
    prompt = smollm2.source.tokenizer.encode(text, special=True)
    torch.set_num_threads(threads)
    try:
        served = reference(smollm2.source, dtype="bfloat16", quantized=quantized, max_num_tokens=chunk)
        sample = served.generate([prompt], greedy(16, ignore_eos=False))[0].samples[0]
    finally:
        torch.set_num_threads(1)
    assert smollm2.source.tokenizer.decode(sample.ids, skip_special=True).strip() == "The capital of France is Paris."
    assert sample.finish_reason == "stop"


# ----------------------------------------------------------------------------------------------------- bf16, as served


def text_ids(smollm2: Reference) -> list[list[int]]:
    """Greedy continuations in float32: text that the model finds likely, and that no file has to hold."""
    prompts = [smollm2.source.tokenizer.encode(text, special=False) for text in (PROMPTS[1], PROMPTS[3], PROMPTS[14])]
    sampled = greedy(PREFIX + TAIL, temperature=1.0, seed=3, logprobs=None)
    results = smollm2.generate(prompts, sampled)
    return [(prompt + result.ids)[: PREFIX + TAIL] for prompt, result in zip(prompts, results, strict=True)]


@torch.inference_mode()
def cached_transformers(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocab] of its own cached path: a prefix at once, then token by token."""
    out = model(torch.tensor([ids[:PREFIX]]), use_cache=True)
    parts = [out.logits[0]]
    for at in range(PREFIX, len(ids)):
        out = model(torch.tensor([ids[at : at + 1]]), past_key_values=out.past_key_values, use_cache=True)
        parts.append(out.logits[0])
    return torch.cat(parts).float().log_softmax(-1)


@torch.inference_mode()
def ours(ref: Reference, ids: list[int]) -> torch.Tensor:
    """The same through our decoder: two chunks, then token by token."""
    decoder, pool = Decoder(ref.weights), PagedPool(ref.pool)
    pages = np.arange(1, 1 + ref.layout.num_pages(len(ids)), dtype=np.int32)
    edges = [0, PREFIX // 2, *range(PREFIX, len(ids) + 1)]
    parts = []
    for start, end in zip(edges, edges[1:], strict=False):
        rows = [RowSpan(start, end - start, pages)]
        pool.clear_fresh(rows)
        new = torch.tensor(ids[start:end])
        if len(new) <= decoder.max_few:  # as engine/forward.py chooses
            hidden = decoder.forward_few(new, rows, pool)
        else:
            plan = plan_attention(pool, rows, decoder.windows)
            hidden = decoder.forward(new, torch.arange(start, end), pool, plan)
        parts.append(decoder.logits(hidden))
    return torch.cat(parts).log_softmax(-1)


def quality(exact: list[torch.Tensor], found: list[torch.Tensor], part: slice) -> tuple[float, float]:
    """(mean KL against exact, share of argmaxes that flip) over one part of every text."""
    a, b = torch.cat([t[part] for t in exact]), torch.cat([t[part] for t in found])
    divergence = (a.exp() * (a - b)).sum(-1).mean()
    return float(divergence), float((a.argmax(-1) != b.argmax(-1)).float().mean())


def test_bf16_is_as_close_to_float32_as_transformers_is(smollm2: Reference, smollm2_transformers: Any):
    """Teacher-forced; the packed weights that are served and the dense ones; prefill and decode judged apart."""
    texts = text_ids(smollm2)
    full = smollm2_transformers(torch.float32)
    with torch.inference_mode():
        exact = [full(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in texts]
    theirs = [cached_transformers(smollm2_transformers(torch.bfloat16), ids) for ids in texts]
    for quantized in (True, False):
        ref = reference(smollm2.source, dtype="bfloat16", quantized=quantized)
        mine = [ours(ref, ids) for ids in texts]
        for part in (slice(0, PREFIX), slice(PREFIX, None)):
            count = sum(len(t[part]) for t in exact)
            their_kl, their_flips = quality(exact, theirs, part)
            my_kl, my_flips = quality(exact, mine, part)
            figures = f"{quantized=} {part}: KL {my_kl:.5f}/{their_kl:.5f}, flips {my_flips:.4f}/{their_flips:.4f}"
            assert my_kl <= 1.5 * their_kl, figures
            assert my_flips <= 1.5 * their_flips + 3 * (0.02 / count) ** 0.5, figures  # and what chance may add
