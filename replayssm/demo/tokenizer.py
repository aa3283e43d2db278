"""A byte-level tokenizer with Qwen's chat markers: any text, one token a byte, no training."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = '<|endoftext|>'
END_OF_TURN = '<|im_end|>'
SPECIAL_TOKENS = (
    END_OF_TEXT,
    '<|im_start|>',
    END_OF_TURN,
    '<|vision_start|>',
    '<|vision_end|>',
    '<|image_pad|>',
    '<|video_pad|>',
)

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for part in content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if has_system -%}{{- text(messages[0].content) + '\\n\\n' -}}{%- endif -%}
    {{- '# Tools\\n\\nYou may call these functions:\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>\\n\\nA call is a JSON object with "name" and "arguments" between <tool_call> and </tool_call>.' -}}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and tools and loop.first -%}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>user\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response><|im_end|>\\n' -}}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\\n' + text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set arguments = call.function.arguments -%}
            {{- '\\n<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' -}}
            {{- arguments if arguments is string else (arguments | tojson) -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; token ids 0..255 are the bytes in the order of the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: token for token, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return with_chat_markers(tokenizer)


def with_chat_markers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a byte-level `tokenizer` with `SPECIAL_TOKENS` behind its own tokens, and the chat template."""
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TURN, pad_token=END_OF_TEXT)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def readable_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids of printable ASCII, the newline and the end of a turn."""
    printable = '\n' + ''.join(map(chr, range(32, 127)))
    return [*tokenizer.encode(printable), tokenizer.convert_tokens_to_ids(END_OF_TURN)]
