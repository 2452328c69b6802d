"""Chat templates: equal to transformers' rendering, and contents found where they are."""

from __future__ import annotations

import numpy as np
import pytest
from builders import CHATML_TEMPLATE, build_bytelevel_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from logitstore.byte_ends import Proof
from logitstore.chat import ChatTemplate
from logitstore.documents import Document, Segment
from logitstore.errors import TokenizerError

LLAMA3_TEMPLATE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = "01 Jan 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|im_end|>" }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n\\n'+ message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n\\n' }}
{%- endif %}
"""

MISTRAL_TEMPLATE = """{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" and ns.index % 2 == 0 %}
        {{- " [INST] " + message["content"].strip() + " [/INST]" }}
    {%- elif message.role == "assistant" and ns.index % 2 == 1 %}
        {{- " " + message["content"].strip() + eos_token}}
    {%- else %}
        {{- raise_exception("roles must alternate user and assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
"""

GENERATION_TEMPLATE = """{% for message in messages %}
{% if loop.index > 20 %}{% break %}{% endif %}
    {% if message.role == 'assistant' %}
    {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {% else %}
{{ {"role": message.role} | tojson }}: {{ message.content }}
    {% endif %}
{% endfor %}
"""

TEMPLATES = {
    "chatml": CHATML_TEMPLATE,
    "llama3": LLAMA3_TEMPLATE,
    "mistral": MISTRAL_TEMPLATE,
    "generation": GENERATION_TEMPLATE,
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def chat(*turns, source=""):
    return Document(tuple(Segment(role, content) for role, content in turns), source)


def contents_of(rendered):
    return [rendered.text[begin:end] for begin, end in rendered.spans]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Transformers' own tokenizer, to render with."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(build_bytelevel_tokenizer(tmp_path_factory.mktemp("tokenizer")))


CHATS = [
    [("user", "Hi & <b>bye</b>"), ("assistant", "  Hello\n\nthere 🎉 ")],
    [("user", "s"), ("assistant", "user"), ("user", "s"), ("assistant", "{{ bos_token }}")],
    [("user", "\n\nspaces\t"), ("assistant", "")],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", CHATS)
def test_render_equals_transformers(reference, name, turns):
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = reference.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False)
    rendered = ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS).render(chat(*turns))
    assert rendered.text == expected
    stripped = [content.strip() for _, content in turns]
    assert [content.strip() for content in contents_of(rendered)] == [content for content in stripped if content]


def test_render_finds_contents_as_short_as_the_templates_own_words():
    rendered = ChatTemplate(CHATML_TEMPLATE, {}).render(chat(("user", "s"), ("assistant", "a")))
    assert rendered.proof == Proof.BYTES
    assert rendered.text[: rendered.spans[0][0]].endswith("user\n")
    assert rendered.text[: rendered.spans[1][0]].endswith("assistant\n")


def test_render_keeps_only_the_special_tokens_that_a_template_mentions():
    assert ChatTemplate(MISTRAL_TEMPLATE, SPECIAL_TOKENS).variables == {"bos_token": "<s>", "eos_token": "</s>"}
    assert ChatTemplate(CHATML_TEMPLATE, SPECIAL_TOKENS).variables == {}


def test_render_gives_a_fixed_date():
    rendered = ChatTemplate("{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}", {}).render(chat(("user", "x")))
    assert rendered.text == "01 Jan 2024 x"


def test_render_keeps_its_template_from_the_interpreter():
    template = ChatTemplate("{{ messages.append(1) }}{{ ''.__class__.__mro__ }}", {})
    with pytest.raises(TokenizerError, match="chat template refuses"):
        template.render(chat(("user", "x")))


def test_content_lengths_of_stripped_contents_lose_no_byte():
    document = chat(("user", "  é\n"), ("assistant", "\n \n"), ("user", "b "))
    template = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", {})
    rendered = template.render(document)
    assert rendered.text == "[é][][b]"
    assert rendered.proof == Proof.CHARACTERS
    # One token for each character: the whitespace goes to the content before, and at the start to the first.
    lengths = rendered.content_lengths(np.array([1, 2, 1, 1, 1, 1, 1, 1]))
    assert lengths.tolist() == [0, 2 + 2 + 1 + 3, 0, 0, 0, 0, 2, 0]


def test_content_lengths_of_tokens_across_edges_count_the_content_only():
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {})
    rendered = template.render(chat(("user", "ab"), ("assistant", "cd")))
    assert rendered.text == "[ab][cd]"
    assert rendered.content_lengths(np.array([2, 2, 3, 1])).tolist() == [1, 1, 2, 0]
    assert rendered.content_lengths(np.array([8])).tolist() == [4]


@given(st.lists(st.text(), min_size=1, max_size=4), st.sampled_from(["chatml", "generation"]), st.data())
def test_content_lengths_sum_up_for_any_cut(contents, name, data):
    document = chat(*(("assistant" if n % 2 else "user", content) for n, content in enumerate(contents)))
    rendered = ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS).render(document)
    size = len(rendered.text.encode())
    cuts = data.draw(st.sets(st.integers(1, max(size - 1, 1)), max_size=20))
    lengths = np.diff([0, *sorted(cuts), size])
    assert rendered.content_lengths(lengths).sum() == document.num_bytes
    assert rendered.proof == Proof.BYTES


def test_render_searches_where_a_template_looks_into_contents():
    template = ChatTemplate("{% for m in messages %}{{ m.content.split('</think>')[-1] }}|{% endfor %}", {})
    assert template.render(chat(("user", "q"), ("assistant", "a"))).proof == Proof.BYTES
    upper = ChatTemplate(
        "{% for m in messages %}{{ 'Q:' if '?' in m.content else 'A:' }}{{ m.content }}|{% endfor %}", {}
    )
    rendered = upper.render(chat(("user", "why?"), ("assistant", "so")))
    assert contents_of(rendered) == ["why?", "so"]
    assert rendered.proof == Proof.NONE


def test_render_names_a_message_whose_content_is_changed():
    template = ChatTemplate("{% for m in messages %}{{ m.content | upper }}{% endfor %}", {})
    with pytest.raises(TokenizerError, match=r"a\.jsonl: .* message 2 \(assistant: 'quiet'\): .*--chat-template"):
        template.render(chat(("user", "LOUD"), ("assistant", "quiet"), source="a.jsonl"))


def test_render_names_a_chat_that_the_template_refuses():
    template = ChatTemplate(MISTRAL_TEMPLATE, SPECIAL_TOKENS)
    with pytest.raises(TokenizerError, match=r"a\.jsonl: .* refuses roles assistant: roles must alternate"):
        template.render(chat(("assistant", "x"), source="a.jsonl"))


def test_chat_template_refuses_what_is_not_jinja():
    with pytest.raises(TokenizerError, match="not valid Jinja"):
        ChatTemplate("{% for %}", {})
