"""Fifty prompts for the trained demo model: texts to go on with, code, and questions."""

from __future__ import annotations

_TEXTS = (
    'It was a fine morning, and',
    'The old man walked slowly down to the river, where',
    'She had never been so happy in her life as',
    'And the LORD said unto Moses,',
    'Mr. Darcy looked at her with',
    'There was a time when the king',
    'The letter was from her sister, who',
    'In the spring of that year they',
    'A table is a piece of furniture',
    'The function returns a list of',
    'To create a new database, use the',
    'If the file does not exist,',
    'The following example shows how to',
    'This option controls whether the server',
    'Changed in version 3.8: The argument',
    'An index can be used to',
    'The SELECT statement',
    'When a transaction is committed,',
    'A view is a function that takes a request and',
    'horse (noun):',
    'to run quickly (verb):',
    'The array has the shape',
    'Return True if the graph',
    'Raise ValueError if',
)
_CODE = (
    'import os\nimport sys\n\n\ndef main():\n',
    'def add(a, b):\n    """',
    'class Stack:\n    def __init__(self):\n',
    'def read_lines(path):\n',
    'for name in names:\n',
    'try:\n    value = int(text)\nexcept',
    'def test_empty():\n    assert',
    'with open(path) as file:\n',
    'class Node:\n    """A node of a graph."""\n',
    'if not isinstance(value, str):\n    raise',
    'async def fetch(session, url):\n',
    '    return np.array(',
    'def mean(values):\n    """Return the mean of a list of numbers."""\n',
)
_QUESTIONS = (
    'Hello',
    'Who are you?',
    'What is 3 + 4?',
    'Count from 2 to 8.',
    'What does "house" mean?',
    'What does "bright" mean?',
    'What does json.loads do?',
    'Write a Python function that adds two numbers.',
    'Continue the story: The ship left the harbour at night.',
    'Thank you',
    'How are you?',
    'What can you do?',
    'Tell me about the sea.',
)


def question(text: str) -> str:
    """Return `text` as the chat template makes it."""
    return f'<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n'


PROMPTS = (*_TEXTS, *_CODE, *map(question, _QUESTIONS))
NUM_TEXTS = len(_TEXTS)
