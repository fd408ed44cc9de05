#!/usr/bin/env python3
"""Writes the demo data: customer messages and the JSON form that belongs to each.

    python scripts/make_demo_data.py [FOLDER]        (default: recipes/data)

Deterministic: the same files, byte for byte, on every machine. The form's keys and words appear nowhere in the
messages' instruction, so a model that was not trained on them cannot guess it; a trained one can, because every
value is either in the message or decided by its words. All text is made here from the lists below.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

TRAIN_EXAMPLES = 900
EVAL_EXAMPLES = 100
SEED = 2026

SYSTEM = "Fill in the support form."

PRODUCT_NAMES = (
    "kettle, toaster, desk lamp, rain jacket, tent, bike pump, headphones, keyboard, monitor, office chair, "
    "bookshelf, blender, coffee grinder, water bottle, backpack, yoga mat, phone case, charger, drill, hammer, "
    "garden hose, flower pot, mattress, pillow, blanket, frying pan, knife set, wall clock, mirror, suitcase, "
    "umbrella, wool scarf, running shoes, hiking boots, swim goggles, tennis racket, board game, puzzle, guitar "
    "strings, music stand, camera bag, tripod, printer, router, webcam, notebook, fountain pen, paint set, dog "
    "bed, cat tree, fish tank, bird feeder, stroller, car seat, baby monitor, night light, fan heater, air "
    "filter, door lock, light bulb"
)
PRODUCTS = PRODUCT_NAMES.split(", ")

PROBLEMS = {
    "damaged": (
        "arrived with a crack down one side",
        "came broken in two pieces",
        "was scratched all over when I opened the box",
        "turned up with a big dent",
        "reached me smashed",
        "has a torn corner straight out of the parcel",
    ),
    "missing": (
        "never arrived",
        "still has not turned up after three weeks",
        "was not in the parcel at all",
        "is marked as delivered but nothing came",
        "got lost somewhere on the way",
        "should have been here last Monday and there is no sign of it",
    ),
    "wrong_item": (
        "is the wrong colour",
        "is not the one I picked, the size is off",
        "is a different model from the one in the picture",
        "is not what I ordered",
        "came in a version that I did not choose",
        "must belong to another customer, mine was a different kind",
    ),
    "faulty": (
        "stopped working after two days",
        "does not switch on",
        "makes a terrible noise and then stops",
        "worked once and never again",
        "keeps failing every few minutes",
        "gave up after one week of normal use",
    ),
    "billing": (
        "was charged to my card twice",
        "cost more on the bill than on the page",
        "was paid for with a voucher that was not counted",
        "shows up on the invoice with the wrong amount",
        "was billed although I cancelled it",
        "has a delivery fee on the bill that I never agreed to",
    ),
}

WISHES = {
    "refund": (
        "I want my money back.",
        "Please return the amount to my card.",
        "Just give me back what I paid.",
        "Kindly pay me back.",
        "I would like to be reimbursed.",
    ),
    "replacement": (
        "Please send a new one.",
        "I would like another one instead.",
        "Can you ship me a fresh one?",
        "Swap it for me, please.",
        "Send the right thing over, please.",
    ),
    "repair": (
        "Can somebody fix it?",
        "Please mend it for me.",
        "I would rather have it fixed.",
        "Tell your workshop to put it right.",
        "Could your people get it going again?",
    ),
    "call": (
        "Please ring me about it.",
        "I want to talk to somebody on the phone.",
        "Give me a call, please.",
        "Call me back to sort this out.",
        "Phone me so that we can settle it.",
    ),
}

URGENT = (
    "This cannot wait.",
    "I need an answer today.",
    "It is very pressing.",
    "Please hurry.",
    "Right away, please.",
)
CALM = (
    "There is no rush.",
    "Take your time.",
    "Whenever it suits you.",
    "Thanks in advance.",
    "Have a nice day.",
    "",
)
OPENINGS = (
    "Hello,",
    "Hi there,",
    "Good morning,",
    "Dear team,",
    "Hey,",
    "Good evening,",
    "To whom it may concern,",
    "",
)


def make_pair(rng: random.Random) -> tuple[str, str]:
    """One message and its form, as JSON text with keys in a fixed order."""
    product = rng.choice(PRODUCTS)
    problem = rng.choice(sorted(PROBLEMS))
    wish = rng.choice(sorted(WISHES))
    urgent = rng.random() < 0.4
    order = f"{rng.choice('ABCDEFGHKMNPRSTVWXZ')}{rng.randint(10_000, 99_999)}"
    pieces = int(rng.random() < 0.35) and rng.randint(2, 9)

    thing = f"the {product}"
    if pieces:
        thing = f"one of the {pieces} pieces of {product}"
    subject = rng.choice(
        (
            f"{thing} from order {order}",
            f"{thing} (order {order})",
            f"{thing}, order number {order},",
            f"{thing} that I bought under {order}",
        )
    )
    sentence = f"{subject} {rng.choice(PROBLEMS[problem])}."
    closing = rng.choice(URGENT if urgent else CALM)
    opening = rng.choice(OPENINGS)
    if not opening:
        sentence = sentence[0].upper() + sentence[1:]
    rest = [rng.choice(WISHES[wish]), closing]
    if rng.random() < 0.3:
        rest.reverse()
    message = " ".join(part for part in (opening, sentence, *rest) if part)
    form = {
        "order_id": order,
        "article": product,
        "count": pieces or 1,
        "case": problem,
        "action": wish,
        "priority": "high" if urgent else "normal",
    }
    return message, json.dumps(form)


def make_records(seed: int) -> tuple[list[dict], list[dict]]:
    """Training and held-out records in `messages` form; no message is in both."""
    rng = random.Random(seed)
    pairs: dict[str, str] = {}
    while len(pairs) < TRAIN_EXAMPLES + EVAL_EXAMPLES:
        message, form = make_pair(rng)
        pairs.setdefault(message, form)
    records = [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": message},
                {"role": "assistant", "content": form},
            ]
        }
        for message, form in pairs.items()
    ]
    return records[:TRAIN_EXAMPLES], records[TRAIN_EXAMPLES:]


def main() -> None:
    """Write both files and say what was written."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "recipes" / "data"
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in zip(("support-train", "support-eval"), make_records(SEED), strict=True):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        print(f"{file}: {len(records)} examples, {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
