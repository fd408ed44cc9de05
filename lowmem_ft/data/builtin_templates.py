"""Chat templates for tokenizers that come without one. Each has a generation prompt and ends every turn in a token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_ft.errors import Problem, RecipeError, nearest

# Text and name of a tool call, as Hermes and Qwen models write it.
_TOOL_CALLS = """\
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function is defined else call %}
{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{"name": ' + (function.name | tojson) }}
{{- ', "arguments": ' + (function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}"""

_TOOLS = """\
{%- if tools %}
{{- '# Tools\\n\\nYou may call these functions, each call a JSON object in <tool_call></tool_call>:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>' }}
{%- endif %}"""

_CHATML = (
    """\
{%- set first_is_system = messages and messages[0].role in ['system', 'developer'] %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if first_is_system %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
"""
    + _TOOLS
    + """
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and first_is_system and tools) %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
"""
    + _TOOL_CALLS
    + """
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

_LLAMA_3 = (
    """\
{{- bos_token }}
{%- macro header(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{%- endmacro %}
{%- set first_is_system = messages and messages[0].role in ['system', 'developer'] %}
{%- if tools %}
{{- header('system') }}
{%- if first_is_system %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
"""
    + _TOOLS
    + """
{{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and first_is_system and tools) %}
{{- header({'developer': 'system', 'tool': 'ipython'}.get(message.role, message.role)) + (message.content or '') }}
"""
    + _TOOL_CALLS
    + """
{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- header('assistant') }}{%- endif %}"""
)

# Gemma has no system turn: its text opens the first user turn, as in Google's own templates.
_GEMMA = """\
{{- bos_token }}
{%- if tools %}{{- raise_exception('The gemma template has no place for tools') }}{%- endif %}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message.role in ['system', 'developer'] and loop.first %}
{%- set ns.system = message.content + '\\n\\n' %}
{%- elif message.role not in ['user', 'assistant'] or message.tool_calls %}
{{- raise_exception('The gemma template knows user and assistant turns and one system turn at the start, not ' ~
    ('tool calls' if message.tool_calls else message.role + ' at turn ' ~ loop.index)) }}
{%- else %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
{%- if message.role == 'user' %}{{- ns.system }}{%- set ns.system = '' %}{%- endif %}
{{- message.content + '<end_of_turn>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Mistral has neither a system turn nor a generation prompt: [/INST] asks for the answer.
_MISTRAL = """\
{{- bos_token }}
{%- if tools %}{{- raise_exception('The mistral template has no place for tools') }}{%- endif %}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message.role in ['system', 'developer'] and loop.first %}
{%- set ns.system = message.content + '\\n\\n' %}
{%- elif message.role not in ['user', 'assistant'] or message.tool_calls %}
{{- raise_exception('The mistral template knows user and assistant turns and one system turn at the start, not ' ~
    ('tool calls' if message.tool_calls else message.role + ' at turn ' ~ loop.index)) }}
{%- elif message.role == 'user' %}
{{- '[INST]' + ns.system + message.content + '[/INST]' }}{%- set ns.system = '' %}
{%- else %}
{{- message.content + eos_token }}
{%- endif %}
{%- endfor %}"""

_PLAIN = (
    """\
{%- if tools %}
"""
    + _TOOLS
    + """
{{- eos_token + '\\n\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '### ' + message.role | capitalize + ':\\n' + (message.content or '') }}
"""
    + _TOOL_CALLS
    + """
{{- eos_token + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Assistant:\\n' }}{%- endif %}"""
)


@dataclass(frozen=True)
class BuiltinTemplate:
    """A chat template of our own.

    Attributes:
        text: jinja text.
        tokens: texts that the tokenizer must hold as one token each, else the template would mean something else to it.
    """

    text: str
    tokens: tuple[str, ...]

    def missing_in(self, vocabulary: Collection[str]) -> list[str]:
        """The tokens of the template that a tokenizer with these added tokens does not have."""
        return [token for token in self.tokens if token not in vocabulary]


BUILTIN_TEMPLATES: dict[str, BuiltinTemplate] = {
    "chatml": BuiltinTemplate(_CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama-3": BuiltinTemplate(_LLAMA_3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "gemma": BuiltinTemplate(_GEMMA, ("<start_of_turn>", "<end_of_turn>")),
    "mistral": BuiltinTemplate(_MISTRAL, ("[INST]", "[/INST]")),
    "plain": BuiltinTemplate(_PLAIN, ()),
}


def usable_templates(vocabulary: Collection[str]) -> list[str]:
    """Names of the built-in templates whose tokens are all in `vocabulary`; "plain" always is."""
    return [name for name, template in BUILTIN_TEMPLATES.items() if not template.missing_in(vocabulary)]


def template_text(tokenizer: Any, template: str | None) -> str:
    """The jinja text that a name or a path stands for; for None the tokenizer's own, "" if it has none.

    Raises:
        RecipeError: no such template, one that needs tokens which the tokenizer lacks, or a file that cannot be read.
    """
    if template is None:
        own = tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get("default") or next(iter(own.values()), None)
        return own or ""
    vocabulary = tokenizer.get_vocab()
    if template in BUILTIN_TEMPLATES:
        missing = BUILTIN_TEMPLATES[template].missing_in(vocabulary)
        if missing:
            raise RecipeError(
                Problem(
                    "data.template",
                    f'"{template}" needs {", ".join(missing)}, which the tokenizer does not have as single tokens',
                    f"Write one that it has the tokens for: {', '.join(usable_templates(vocabulary))}",
                )
            )
        return BUILTIN_TEMPLATES[template].text
    path = Path(template)
    if not path.is_file():
        close = nearest(template, list(BUILTIN_TEMPLATES))
        guess = f"Did you mean {close}? " if close else ""
        raise RecipeError(
            Problem(
                "data.template",
                f'"{template}" is neither a built-in template nor a file',
                f"{guess}Built in are {', '.join(BUILTIN_TEMPLATES)}",
            )
        )
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            Problem("data.template", f'"{template}" cannot be read: {error}', "Write it as UTF-8.")
        ) from error
