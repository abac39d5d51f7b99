"""The lesson: each topic's words, in two languages, around figures that are measured when the lesson is made.

Figures come from `measurements` and know no language; words come from `texts` and hold no measured number.
"""

from attemper.lesson.making import chapter, question_of
from attemper.lesson.topics import LANGUAGES, TOPICS, check_topic

__all__ = ["LANGUAGES", "TOPICS", "chapter", "check_topic", "question_of"]
