"""Tasks as llama-server counts them."""

import pytest

from proxy.admission.cost import Work, charge, count_work, is_wide


@pytest.mark.parametrize(
    ("endpoint", "body", "tasks", "n"),
    [
        ("/v1/completions", {"prompt": "a"}, 1, 1),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, 3, 1),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4, 2),
        ("/v1/completions", {"prompt": [1, 2, 3]}, 1, 1),
        ("/v1/completions", {"prompt": [1, "a", 3]}, 1, 1),
        ("/v1/completions", {"prompt": ["a", "b", 3]}, 1, 1),
        ("/v1/completions", {"prompt": [[1, 2], [3], "x", {"prompt_string": "y"}]}, 4, 1),
        ("/v1/completions", {"prompt": [[1, "a"], [2]]}, 2, 1),
        ("/v1/completions", {"prompt": {"prompt_string": "a"}}, 1, 1),
        ("/v1/completions", {"prompt": []}, 1, 1),
        ("/v1/completions", {"prompt": [True, False]}, 2, 1),
        ("/v1/completions", {"prompt": [1.5, 2.5]}, 2, 1),
        ("/v1/completions", {}, 1, 1),
        ("/completion", {"prompt": ["a", "b"], "n_cmpl": 3, "n": 2}, 6, 3),
        ("/completion", {"prompt": "a", "n_cmpl": None, "n": 2}, 2, 2),
        ("/v1/chat/completions", {"messages": [{}, {}], "n": 3}, 3, 3),
        ("/v1/chat/completions", {"messages": [], "n": None}, 1, 1),
        ("/v1/chat/completions", {"messages": [], "n": 0}, 1, 1),
        ("/v1/chat/completions", {"messages": [], "n": -5}, 1, 1),
        ("/v1/chat/completions", {"messages": [], "n": "4"}, 1, 1),
        ("/v1/chat/completions", {"messages": [], "n": 2.0}, 2, 2),
        ("/v1/chat/completions", {"messages": [], "n": float("nan")}, 1, 1),
        ("/v1/chat/completions", {"messages": [], "n": 10**30}, 10**30, 10**30),
        ("/v1/chat/completions", {"messages": [], "n": 2**32 + 3}, 3, 3),
        ("/v1/chat/completions", {"messages": [], "n": 2**64 - 1}, 1, 1),
        ("/v1/chat/completions", {"messages": [], "n": -(2**32) + 2}, 2, 2),
        ("/v1/chat/completions", {"messages": [], "n": True}, 1, 1),
        ("/v1/chat/completions", {"messages": [], "n": 2.0**32 + 1}, 2**32 + 1, 2**32 + 1),
        ("/v1/responses", {"input": ["a", "b"], "n": 2}, 2, 2),
        ("/v1/messages", {"messages": [{}], "n": 4}, 1, 1),
        ("/infill", {"prompt": "a", "input_prefix": "x", "n_cmpl": 2}, 2, 2),
        ("/v1/embeddings", {"input": "a"}, 1, 1),
        ("/v1/embeddings", {"input": ["a"] * 100, "n": 7}, 100, 1),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 1, 1),
        ("/v1/embeddings", {"input": [[1], [2], {"content": "x"}]}, 3, 1),
        ("/embedding", {"content": ["a", "b"]}, 2, 1),
        ("/v1/rerank", {"query": "q", "documents": ["a"] * 200}, 200, 1),
        ("/reranking", {"query": "q", "texts": ["a", "b"]}, 2, 1),
        ("/rerank", {"query": "q", "documents": []}, 1, 1),
        ("/v1/audio/transcriptions", None, 1, 1),
        ("/tokenize", {"content": "a"}, 0, 1),
        ("/detokenize", {"tokens": [1]}, 0, 1),
        ("/apply-template", {"messages": []}, 0, 1),
        ("/v1/messages/count_tokens", {"messages": []}, 0, 1),
        ("/props", None, 0, 1),
        ("/something/new", {"prompt": ["a", "b"]}, 1, 1),
    ],
)
def test_tasks_of_a_body(endpoint, body, tasks, n):
    """One task per prompt times n, per input, per document; an array with an integer is one prompt."""
    assert count_work(endpoint, body) == Work(tasks, n)


@pytest.mark.parametrize(
    ("tasks", "n", "slots", "cost", "wide"),
    [
        (1, 1, 4, 1, False),
        (4, 1, 4, 4, False),
        (100, 1, 4, 4, True),
        (4, 4, 4, 4, False),
        (8, 4, 4, 4, True),
        (5, 5, 4, 0, False),
        (0, 1, 4, 0, False),
        (1, 1, 1, 1, False),
    ],
)
def test_charge(tasks, n, slots, cost, wide):
    """min(tasks, slots); n above the slots has nothing to wait for and is never wide."""
    assert charge(tasks, n, slots) == cost
    assert is_wide(tasks, n, slots) is wide
