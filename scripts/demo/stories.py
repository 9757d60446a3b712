"""Writes the corpus of the demo checkpoint: short stories for children, put together from parts by
chance.

The text is the project's own. A story draws its characters, place, weather, wish and trouble once
and keeps them to the end, so that a small model can learn both the language and to stay with the
thread.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from story_parts import (
    ANIMALS,
    ENDINGS,
    FOODS,
    FRIENDS,
    HOBBIES,
    NAMES,
    OPENINGS,
    PEOPLE,
    PLACES,
    PLOTS,
    THINGS,
    TRAITS,
)

_CHOICE = re.compile(r"\{([^{}]*\|[^{}]*)\}")
_SLOT = re.compile(r"\{(\w+)\}")

_PRONOUNS = {"she": ("she", "her", "her"), "he": ("he", "him", "his")}


def _draw_person(rng: random.Random, taken: set[str]) -> dict[str, str]:
    gender = rng.choice(["she", "he"])
    name = rng.choice([n for n in NAMES[gender] if n not in taken])
    taken.add(name)
    kind = rng.choice(ANIMALS + PEOPLE[gender])
    subject, object_, possessive = _PRONOUNS[gender]
    return {"name": name, "kind": kind, "they": subject, "them": object_, "their": possessive}


def _draw_slots(rng: random.Random) -> dict[str, str]:
    taken: set[str] = set()
    hero, friend = _draw_person(rng, taken), _draw_person(rng, taken)
    slots = {**hero, **{f"friend_{key}": value for key, value in friend.items()}}
    place, indoors = rng.choice(PLACES)
    thing, other_thing = rng.sample(THINGS, 2)
    return slots | {
        "place": place,
        "spot": indoors,
        "trait": rng.choice(TRAITS),
        "friend_trait": rng.choice(TRAITS),
        "hobby": rng.choice(HOBBIES),
        "thing": thing,
        "other": other_thing,
        "food": rng.choice(FOODS),
        "bond": rng.choice(FRIENDS),
    }


def _fill(text: str, slots: dict[str, str], rng: random.Random) -> str:
    """Put in slots, then resolve choices from the inside out, then mend articles and capital
    letters.
    """
    text = _SLOT.sub(lambda found: slots[found.group(1)], text)
    while match := _CHOICE.search(text):
        text = text[: match.start()] + rng.choice(match.group(1).split("|")) + text[match.end() :]
    text = re.sub(r"\b([Aa]) (?=[aeiou]|hones)", r"\1n ", text)
    return re.sub(
        r"(^|[.!?]\s+|[.!?,] \"|^\")([a-z])", lambda m: m.group(1) + m.group(2).upper(), text
    )


def story(rng: random.Random) -> str:
    """Return one story as two to four paragraphs of plain text."""
    slots = _draw_slots(rng)
    plot = rng.choice(PLOTS)
    parts = [rng.choice(OPENINGS), *plot, rng.choice(ENDINGS)]
    return "\n\n".join(_fill(part, slots, rng) for part in parts)


def stories(seed: int, count: int) -> Iterator[str]:
    """Yield `count` stories that depend on `seed` alone."""
    rng = random.Random(seed)
    for _ in range(count):
        yield story(rng)
