"""Chat templates of well-known models, written from memory, with small tokenizers that have their special tokens."""

from __future__ import annotations

from pathlib import Path

from builders import TEXTS, build_bytelevel_tokenizer, build_metaspace_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from logitstore.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)

# Strips contents, injects a system prompt with a date, writes what tools say as JSON.
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{{- system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
"""

# Ends a user's turn by plain text, and merges the system prompt into the first one.
MISTRAL = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system_message if loop.first else '') + message.content + '[/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# As some later ones of Mistral do: the system prompt stands before the last user's turn.
MISTRAL_LAST = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set prefix = system_message if loop.index0 == messages | length - 2 else '' %}
        {{- '[INST] ' + prefix + message.content + '[/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# Llama-2's: a space stands between an answer and what ends it.
LLAMA2 = """{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# Calls the assistant "model", merges the system prompt, strips.
GEMMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set prefix = messages[0]['content'] + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set prefix = '' %}
{%- endif %}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') + message.content | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
"""

PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{{ eos_token }}"
)

# No special tokens at all: a newline ends what anybody says.
PLAIN = "{% for message in messages %}{{ message.role | upper + ': ' + message.content + '\n' }}{% endfor %}"

TEMPLATES = {
    "chatml": (CHATML, ()),
    "llama3": (LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": (MISTRAL, ()),
    "mistral_special": (MISTRAL, ("[INST]", "[/INST]")),
    "mistral_last": (MISTRAL_LAST, ()),
    "llama2": (LLAMA2, ()),
    "gemma": (GEMMA, ("<start_of_turn>", "<end_of_turn>")),
    "phi3": (PHI3, ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>")),
    "plain": (PLAIN, ()),
}

END_OF_TURN = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "mistral_special": "</s>",
    "mistral_last": "</s>",
    "llama2": "</s>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
}


def load_chat_tokenizer(folder: Path, name: str, *, metaspace: bool = False) -> Tokenizer:
    """A small tokenizer with the special tokens and the template of a model family."""
    template, special = TEMPLATES[name]
    if metaspace:
        build_metaspace_tokenizer(folder, 500, chat_template=template)
    else:
        # No room for merges: every token is a byte, so that pairs can be written by hand.
        build_bytelevel_tokenizer(folder, 260, texts=TEXTS[:1], chat_template=template)
    tokenizer = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)
