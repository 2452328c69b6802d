"""Roles of special tokens: by the chat template, by the configuration, by well-known spellings."""

from __future__ import annotations

import json

import pytest
from builders import build_bytelevel_tokenizer

from logitstore.special_roles import SpecialRoles
from logitstore.tokenizer import Tokenizer

BOS, EOS, IM_START, IM_END = range(4)

LOOP = "{% for m in messages %}%s{% endfor %}"
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}"
)


def load(folder, template=None, **config):
    build_bytelevel_tokenizer(folder, chat_template=template)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(LOOP.replace("%s", "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"), IM_END, id="chatml"),
        pytest.param(INST, EOS, id="inst"),
        pytest.param(LOOP.replace("%s", "{{ m.content }}\n<|im_end|></s>"), IM_END, id="first-of-two"),
        pytest.param(LOOP.replace("%s", "{{ m.role }}: {{ m.content }}\n"), IM_END, id="none-so-by-name"),
        pytest.param("{{ raise_exception('never') }}", IM_END, id="refuses-so-by-name"),
        pytest.param(
            "{% if messages[0].role != 'system' %}{{ raise_exception('system') }}{% endif %}"
            + LOOP.replace("%s", "{{ m.content }}</s>"),
            EOS,
            id="asks-for-a-system-prompt",
        ),
        pytest.param(None, IM_END, id="no-template"),
    ],
)
def test_end_of_turn_is_what_the_template_writes_after_an_answer(tmp_path, template, expected):
    assert load(tmp_path, template).roles.end_of_turn == expected


def test_roles_are_read_from_the_configuration(tmp_path):
    tokenizer = load(tmp_path, INST, pad_token={"content": "<|im_start|>"})
    assert tokenizer.roles == SpecialRoles(bos=BOS, eos=EOS, end_of_turn=EOS, pad=IM_START)


def test_roles_that_no_token_has_are_none(tmp_path):
    build_bytelevel_tokenizer(tmp_path, chat_template=None)
    stored = Tokenizer.from_asset(Tokenizer.from_folder(tmp_path).asset())
    assert stored.roles == SpecialRoles(bos=None, eos=None, end_of_turn=IM_END, pad=None)


def test_a_stored_tokenizer_has_the_roles_that_its_template_tells(tmp_path):
    tokenizer = load(tmp_path, INST)
    stored = Tokenizer.from_asset(tokenizer.asset(), tokenizer.rendering(), tokenizer.template_asset())
    assert stored.roles == tokenizer.roles
