"""Loglikelihoods as lm-eval takes them from OpenAI's routes, in a separate environment.

    python openai_judges.py URL MODEL TOKENIZER_FOLDER

reads pairs of texts as JSON from stdin, and prints for each the tokens of both, the loglikelihood and whether the
second text is the greedy answer.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(url: str, model: str, folder: str) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    pairs: list[list[str]] = json.load(sys.stdin)
    judge: Any = LocalCompletionsAPI(
        base_url=f"{url}/completions", model=model, tokenizer_backend="huggingface", tokenizer=folder, max_length=500
    )
    found = judge.loglikelihood(
        [Instance("loglikelihood", {}, tuple(pair), number) for number, pair in enumerate(pairs)]
    )
    rows = []
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        first, second = judge._encode_pair(context, continuation)
        rows.append([first, second, score, bool(greedy)])
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
