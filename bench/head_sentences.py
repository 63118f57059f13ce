"""English sentences for bench/which_heads.py, written for it: pairs that say the same, and others.

The sentences have 4 to 30 words and eight topics: cooking, weather, money, computers, music,
animals, travel and health. Most topics occur in several pairs, so a neighbour is not obvious.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PAIRS", "SENTENCES", "SINGLES"]

PAIRS: Final = (
    ("The soup needs a little more salt.", "Add a pinch of salt to the soup."),
    (
        "She kneaded the dough for ten minutes and left it to rise under a towel.",
        "After working the dough for a while, she covered it with a cloth so that it could rise.",
    ),
    ("Heavy rain is expected on Friday.", "On Friday it will pour."),
    (
        "A thick fog covered the valley, and the drivers could barely see the road.",
        "Because of the dense fog in the valley, the road was almost invisible to drivers.",
    ),
    ("The bank raised its interest rate.", "Borrowing from the bank now costs more interest."),
    (
        "He saved a tenth of his salary every month for a house of his own.",
        "Each month he put aside ten percent of his pay so that he could buy a home.",
    ),
    ("My laptop does not start any more.", "I press the power button, but my computer stays off."),
    (
        "The program stops with an error if the file that it reads is empty.",
        "When its input file has no content, the software crashes.",
    ),
    ("The choir practised until midnight.", "The singers rehearsed late into the night."),
    (
        "A young woman plays the violin on a square in front of a small crowd of tourists.",
        "Some visitors listen to a girl with a violin who performs in the street.",
    ),
    ("The dog chased a squirrel up a tree.", "A squirrel fled from the dog and climbed a tree."),
    (
        "Every autumn thousands of geese rest on this lake before they fly further south.",
        "The lake is a stop for large flocks of geese on their way south in autumn.",
    ),
    ("Our train was two hours late.", "We arrived two hours behind schedule by rail."),
    (
        "They walked across the old town for hours and still did not find their hotel.",
        "Even after a long search through the historic centre, they could not find the hotel.",
    ),
    ("Her fever went down overnight.", "By the morning her temperature was normal again."),
    (
        "The doctor told him to sleep more, drink less coffee and take a walk every day.",
        "His physician advised more rest, less caffeine and a daily walk.",
    ),
)
"""Pairs of sentences of the same meaning."""

SINGLES: Final = (
    "Fry the onions in butter until they are golden.",
    "The restaurant at the corner serves nothing but noodles.",
    "Snow fell on the desert for the first time in forty years.",
    "The wind tore three tiles off the roof.",
    "The price of wheat doubled within a year.",
    "Nobody at the meeting could explain why the company had lost so much money.",
    "The new version of the database answers most queries twice as fast.",
    "Please change your password before the end of the week.",
    "He tunes pianos for a living.",
    "The last chord of the symphony is so quiet that the audience never knows when to clap.",
    "Cats sleep for most of the day.",
    "An octopus in the aquarium learned to open jars, and at night it took crabs from the tank of "
    "its neighbours.",
    "The ferry leaves from the northern pier at noon.",
    "Do you need a visa for a stay of less than three months?",
    "Wash your hands before dinner.",
    "Although the operation had gone well, the surgeon kept the patient in hospital for another "
    "week, because the wound on his knee healed more slowly than everybody had hoped.",
)
"""Sentences whose meaning no other sentence has."""

SENTENCES: Final = (*(sentence for pair in PAIRS for sentence in pair), *SINGLES)
"""All sentences: the pairs one after the other, then the others."""
