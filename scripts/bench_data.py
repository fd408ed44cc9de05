#!/usr/bin/env python3
"""How long data takes to become tokens, beside the tokenizer alone, in one run, as a ratio.

    python scripts/bench_data.py [RECIPE] [--records 100000] [--pairs 3]

Writes short chat records to a temporary folder. The tokenizer alone gets the rendered conversations, rendering not
counted, in batches of 1,000 on all cores. The project reads, checks, renders, encodes, masks and caches the file, into
a new cache each time; then it is started again on what is cached. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

COMMON = "the a of to in it is was for on are with as his they at be this from have or by one had not but what all"
WORDS = COMMON.split()
BATCH = 1000


def write_records(file: Path, count: int) -> list[list[dict[str, str]]]:
    """Chats of one short question and one short answer."""
    rng = random.Random(5)
    chats = []
    with file.open("w", encoding="utf-8") as stream:
        for number in range(count):
            question = " ".join(rng.choices(WORDS, k=rng.randint(10, 40)))
            answer = " ".join(rng.choices(WORDS, k=rng.randint(5, 40)))
            chat = [
                {"role": "user", "content": f"{number} {question}?"},
                {"role": "assistant", "content": f"{answer}."},
            ]
            stream.write(json.dumps({"messages": chat}) + "\n")
            chats.append(chat)
    return chats


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Tokenizing beside the tokenizer alone.")
    parser.add_argument("recipe", nargs="?", type=Path, default=Path("recipes/llama-lora.yaml"))
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()

    from lowmem_ft.data.dataset import load_split
    from lowmem_ft.recipe.load import load_recipe
    from lowmem_ft.report.progress import Display
    from lowmem_ft.report.quiet import quiet_libraries
    from lowmem_ft.training import inputs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.jsonl"
        chats = write_records(file, options.records)
        overrides = [f"data.train={file}", "data.eval=null", "eval.generate=0"]
        recipe = load_recipe(options.recipe, overrides).recipe
        quiet_libraries()
        found = inputs.find(recipe, Display())
        tokenizer, encoder = inputs.make_tokenizer_and_encoder(recipe, found)
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        del chats
        ratios = []
        for pair in range(options.pairs):
            begun = time.perf_counter()
            tokens = 0
            for start in range(0, len(texts), BATCH):
                batch = tokenizer(texts[start : start + BATCH], add_special_tokens=False)
                tokens += sum(len(ids) for ids in batch["input_ids"])
            alone = time.perf_counter() - begun
            cache = Path(folder) / f"cache-{pair}"
            begun = time.perf_counter()
            split = load_split(recipe.data.train, recipe.data, encoder, cache)
            ours = time.perf_counter() - begun
            begun = time.perf_counter()
            again = load_split(recipe.data.train, recipe.data, encoder, cache)
            second = time.perf_counter() - begun
            assert len(split.tokens) == len(again.tokens) == options.records
            ratios.append(ours / alone)
            print(
                f"pair {pair + 1}: {options.records:,} records, {tokens:,} tokens; tokenizer alone {alone:.1f} s, "
                f"to the cache {ours:.1f} s, ratio {ours / alone:.2f}; second start {second:.2f} s",
                flush=True,
            )
        print(f"ratio: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
