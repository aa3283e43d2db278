"""Short dialogues made out of documents, so that the chat template gets answers, and answers end."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from replayssm.demo.training.corpus import Document

_DEFINITION = re.compile(r'^([a-z][a-z -]+) \((\w+)\): ([^;"]{8,160})(?:;.*?"([^"]{10,160})")?')
_SENTENCE = re.compile(r'(?<=[.!?])\s+(?=[A-Z"])')
_MAX_FUNCTION_LINES = 20
_FUNCTIONS_PER_MODULE = 40
_WORD_SHARE = 0.3
"""There are far more words than functions."""

ABOUT = (
    ('Hello', 'Hello! How can I help you?'),
    ('Hello!', 'Hello! How can I help you?'),
    ('Hi', 'Hi! What would you like to know?'),
    ('Hi there', 'Hi! What would you like to know?'),
    ('Good morning', 'Good morning! What can I do for you?'),
    ('Good evening', 'Good evening! What can I do for you?'),
    ('How are you?', 'I am well, thank you. What would you like to know?'),
    ('Who are you?', 'I am a small demo model. I know a little English and a little Python.'),
    ('What are you?', 'I am a small language model with linear attention, trained to try out a server.'),
    ('What is your name?', 'I have no name. I am the demo model of this server.'),
    ('What can you do?', 'I can define words, explain Python functions, continue stories, count and add.'),
    ('Are you clever?', 'No. I have seven million parameters, and I am often wrong.'),
    ('Can you help me?', 'I can try. Ask me what a word means, or what a Python function does.'),
    ('Thank you', 'You are welcome!'),
    ('Thanks!', 'You are welcome!'),
    ('Goodbye', 'Goodbye!'),
    ('Bye', 'Goodbye!'),
    (
        'What is ReplaySSM?',
        'It keeps one checkpoint of a recurrent state and replays recent inputs from a ring.',
    ),
)
"""What people try first; repeated often enough to be learnt by heart."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One question and its answer."""

    user: str
    assistant: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The dialogue as the chat template takes it."""
        return [{'role': 'user', 'content': self.user}, {'role': 'assistant', 'content': self.assistant}]


def derive(documents: Iterable[Document], seed: int = 0) -> list[Dialogue]:
    """Return the dialogues of all `documents`, shuffled; the same ones every time."""
    rng = random.Random(seed)
    dialogues: list[Dialogue] = []
    for document in documents:
        if document.kind == 'code':
            dialogues += _about_functions(document, rng)
        elif 'wordnet' in document.source:
            dialogues += _about_words(document, rng)
        elif document.kind == 'prose':
            dialogues += _continuations(document, rng)
    for _ in range(len(dialogues) // 10 + 1):
        dialogues += [_counting(rng), _adding(rng), Dialogue(*rng.choice(ABOUT))]
    rng.shuffle(dialogues)
    return dialogues


def _about_words(document: Document, rng: random.Random) -> Iterator[Dialogue]:
    for line in document.text.splitlines():
        found = _DEFINITION.match(line)
        if found is None or rng.random() > _WORD_SHARE:
            continue
        word, part, meaning, example = found.groups()
        question = rng.choice(('What does "{}" mean?', 'What is the meaning of "{}"?', 'Define "{}".', 'Define {}.'))
        answer = f'As {"an" if part[0] == "a" else "a"} {part}, "{word}" means: {meaning.strip()}.'
        if example:
            answer += f' For example: "{example.strip()}"'
        yield Dialogue(question.format(word), answer)


def _about_functions(document: Document, rng: random.Random) -> Iterator[Dialogue]:
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return
    module = document.name.removesuffix('.py').removesuffix('/__init__').replace('/', '.')
    if module == 'posixpath':
        module = 'os.path'
    if document.source.startswith('PyPI '):
        module = f'{document.source.removeprefix("PyPI ")}.{module}'
    definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in definitions[:_FUNCTIONS_PER_MODULE]:
        documentation = ast.get_docstring(node)
        if node.name.startswith('_') or not documentation:
            continue
        summary = ' '.join(documentation.split('\n\n')[0].split())
        if not 20 <= len(summary) <= 300:
            continue
        kind = 'class' if isinstance(node, ast.ClassDef) else 'function'
        question = rng.choice(('What does {} do?', 'What is {} for?', f'Explain the {kind} {{}}.'))
        yield Dialogue(question.format(f'{module}.{node.name}'), summary)
        source = ast.get_source_segment(document.text, node)
        if kind == 'function' and source and source.count('\n') < _MAX_FUNCTION_LINES:
            yield Dialogue(f'Write a Python function {node.name}: {summary}', f'```python\n{source}\n```')


def _continuations(document: Document, rng: random.Random) -> Iterator[Dialogue]:
    for paragraph in document.text.split('\n\n'):
        sentences = _SENTENCE.split(' '.join(paragraph.split()))
        for start in range(0, len(sentences) - 4, 5):
            beginning, rest = sentences[start], ' '.join(sentences[start + 1 : start + 4])
            if 30 <= len(beginning) <= 300 and len(rest) <= 700:
                question = rng.choice(('Continue the story: {}', 'Continue: {}', 'What comes next? {}'))
                yield Dialogue(question.format(beginning), rest)


def _counting(rng: random.Random) -> Dialogue:
    first, count = rng.randrange(30), rng.randrange(3, 12)
    numbers = ', '.join(map(str, range(first, first + count)))
    return Dialogue(f'Count from {first} to {first + count - 1}.', f'{numbers}.')


def _adding(rng: random.Random) -> Dialogue:
    a, b = rng.randrange(20), rng.randrange(20)
    return Dialogue(f'What is {a} + {b}?', f'{a} + {b} = {a + b}.')
