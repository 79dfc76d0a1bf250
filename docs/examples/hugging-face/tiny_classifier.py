"""Writer of a folder as `save_pretrained` makes it: a text classifier of a few words with random weights.

    python tiny_classifier.py FOLDER

It stands for a model from the hub where there is no network. Its labels mean nothing. Needs torch and transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "i", "it", "do", "not", "love", "hate", "film", "good", "bad"]


def write(folder: Path) -> None:
    """Write the tokenizer, the configuration and the weights into a new folder."""
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
    )
    BertForSequenceClassification(config).eval().save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
