"""The embedded model against transformers on the same file: equal in float32, as close as transformers in bf16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Comparison, Reference, greedy, reference, transformers_reference

from tailrace.kernels.paged_attention import PagedPool, RowSpan, plan_attention
from tailrace.model.decoder import Decoder
from tailrace.model.weights import load_weights

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


@pytest.fixture(scope="module")
def served(smollm2: Reference) -> Callable[..., Reference]:
    """served(quantized, **sizes) -> REF in bfloat16; the weights are loaded once."""

    @functools.cache
    def weights(quantized: bool) -> Any:
        return load_weights(smollm2.source, dtype=torch.bfloat16, quantized=quantized)

    return lambda quantized, **sizes: reference(smollm2.source, dtype="bfloat16", weights=weights(quantized), **sizes)


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
def test_the_served_weights_answer_the_capital_of_france(
    smollm2: Reference, served: Callable[..., Reference], quantized: bool, chunk: int, threads: int
):
    """Its first word is a near tie, so it is asked of every way to the same logits: other kernels round otherwise."""
    template = smollm2.source.chat_template
    assert template is not None
    text = template.render([{"role": "user", "content": CHAT}], add_generation_prompt=True)
    prompt = smollm2.source.tokenizer.encode(text, special=True)
    torch.set_num_threads(threads)
    try:
        sample = served(quantized, max_num_tokens=chunk).generate([prompt], greedy(16, ignore_eos=False))[0].samples[0]
    finally:
        torch.set_num_threads(1)
    assert smollm2.source.tokenizer.decode(sample.ids, skip_special=True).strip() == "The capital of France is Paris."
    assert sample.finish_reason == "stop"


# ----------------------------------------------------------------------------------------------------- bf16, as served


def text_ids(ref: Reference) -> list[list[int]]:
    """Sampled continuations: text that the model finds likely, and that no file has to hold."""
    prompts = [ref.source.tokenizer.encode(text, special=False) for text in (PROMPTS[1], PROMPTS[3], PROMPTS[14])]
    sampled = greedy(PREFIX + TAIL, temperature=1.0, seed=3, logprobs=None)
    results = ref.generate(prompts, sampled)
    return [(prompt + result.ids)[: PREFIX + TAIL] for prompt, result in zip(prompts, results, strict=True)]


@torch.inference_mode()
def cached_transformers(model: Any, texts: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities [tokens, vocab] of each, of its own cached path: a prefix at once, then token by token."""
    ids = torch.tensor(texts)
    out = model(ids[:, :PREFIX], use_cache=True)
    parts = [out.logits]
    for at in range(PREFIX, ids.shape[1]):
        out = model(ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
        parts.append(out.logits)
    return list(torch.cat(parts, 1).float().log_softmax(-1))


@torch.inference_mode()
def ours(ref: Reference, texts: list[list[int]]) -> list[torch.Tensor]:
    """The same through our decoder: two chunks, then token by token."""
    decoder, pool = Decoder(ref.weights), PagedPool(ref.pool)
    ids = torch.tensor(texts)
    each = ref.layout.num_pages(ids.shape[1])
    pages = np.arange(1, 1 + len(texts) * each, dtype=np.int32).reshape(len(texts), each)
    edges = [0, PREFIX // 2, *range(PREFIX, ids.shape[1] + 1)]
    parts = []
    for start, end in zip(edges, edges[1:], strict=False):
        rows = [RowSpan(start, end - start, own) for own in pages]
        pool.clear_fresh(rows)
        new = ids[:, start:end].reshape(-1)
        if len(new) <= decoder.max_few:  # as engine/forward.py chooses
            hidden = decoder.forward_few(new, rows, pool)
        else:
            plan = plan_attention(pool, rows, decoder.windows)
            hidden = decoder.forward(new, torch.arange(start, end).repeat(len(texts)), pool, plan)
        parts.append(decoder.logits(hidden).view(len(texts), end - start, -1))
    return list(torch.cat(parts, 1).log_softmax(-1))


def quality(exact: list[torch.Tensor], found: list[torch.Tensor], part: slice) -> tuple[float, float]:
    """(mean KL against exact, share of argmaxes that flip) over one part of every text."""
    a, b = torch.cat([t[part] for t in exact]), torch.cat([t[part] for t in found])
    divergence = (a.exp() * (a - b)).sum(-1).mean()
    return float(divergence), float((a.argmax(-1) != b.argmax(-1)).float().mean())


@pytest.fixture(scope="module")
def texts(served: Callable[..., Reference]) -> list[list[int]]:
    return text_ids(served(True))


@pytest.fixture(scope="module")
def exact(texts: list[list[int]], smollm2_transformers: Any) -> list[torch.Tensor]:
    """Log-probabilities [tokens, vocab] of each text in float32."""
    with torch.inference_mode():
        return list(smollm2_transformers(torch.float32)(torch.tensor(texts)).logits.log_softmax(-1))


@pytest.fixture(scope="module")
def theirs(texts: list[list[int]], smollm2_transformers: Any) -> list[torch.Tensor]:
    return cached_transformers(smollm2_transformers(torch.bfloat16), texts)


@pytest.mark.parametrize("quantized", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_bf16_is_as_close_to_float32_as_transformers_is(
    served: Callable[..., Reference],
    texts: list[list[int]],
    exact: list[torch.Tensor],
    theirs: list[torch.Tensor],
    quantized: bool,
):
    """Teacher-forced; the packed weights that are served, or dense ones; prefill and decode judged apart."""
    mine = ours(served(quantized), texts)
    for part in (slice(0, PREFIX), slice(PREFIX, None)):
        count = sum(len(t[part]) for t in exact)
        their_kl, their_flips = quality(exact, theirs, part)
        my_kl, my_flips = quality(exact, mine, part)
        figures = f"{quantized=} {part}: KL {my_kl:.5f}/{their_kl:.5f}, flips {my_flips:.4f}/{their_flips:.4f}"
        assert my_kl <= 1.5 * their_kl, figures
        assert my_flips <= 1.5 * their_flips + 3 * (0.02 / count) ** 0.5, figures  # and what chance may add
