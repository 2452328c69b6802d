"""Maps between two vocabularies: what they promise on random vocabularies and on real ones, and how they are kept."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from builders import TEXTS, build_bytelevel_tokenizer, build_metaspace_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import fill_store
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from logitstore.documents import Document, Segment
from logitstore.errors import DamageError, VocabularyError
from logitstore.garbage import collect
from logitstore.repair import repair
from logitstore.store import Store
from logitstore.token_projection import TokenProjection
from logitstore.tokenizer import Tokenizer
from logitstore.verification import verify
from logitstore.vocabulary_classes import VocabularyClasses
from logitstore.vocabulary_maps import VocabularyMaps, build_maps, maps_recipe, read_maps, vocabulary_maps

DAY = 86400.0
SPECIALS = ("<s>", "</s>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    build_bytelevel_tokenizer(folder / "bytelevel", 500)
    build_metaspace_tokenizer(folder / "metaspace", 700)
    return folder


@pytest.fixture(scope="module")
def bytelevel(folder):
    return Tokenizer.from_folder(folder / "bytelevel")


@pytest.fixture(scope="module")
def metaspace(folder):
    return Tokenizer.from_folder(folder / "metaspace")


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory):
    """Lower-cased, and without spaces: nothing of it begins like the other side's words."""
    folder = tmp_path_factory.mktemp("wordpiece")
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[SEP]"}))
    return Tokenizer.from_folder(folder)


@pytest.fixture
def store(tmp_path):
    return Store.open_or_create(str(tmp_path / "store"))


def character_tokenizer(folder: Path, tokens: tuple[str, ...]) -> Tokenizer:
    """A ByteLevel vocabulary of ``tokens`` as they are spelled, which never merges anything."""
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys((*SPECIALS, *tokens)))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    home = tmp_path_factory.mktemp("random")

    @cache
    def make(tokens: tuple[str, ...]) -> Tokenizer:
        return character_tokenizer(home / str(len(list(home.iterdir()))), tokens)

    return make


# All in ASCII, where ByteLevel spells a byte as itself; every vocabulary has the four letters.
vocabularies = st.lists(st.text("ab1!", min_size=1, max_size=5), max_size=15).map(lambda more: (*"ab1!", *more))


def push_forward(masses: np.ndarray, classes: np.ndarray, num_classes: int) -> np.ndarray:
    return np.bincount(classes[classes >= 0], weights=masses[classes >= 0], minlength=num_classes)


def check_classes(classes: VocabularyClasses, maps: VocabularyMaps, rng: np.random.Generator) -> None:
    """Every student token is in a class, classes of teacher tokens exist, and masses are neither lost nor made."""
    assert len(classes.student_class) == len(maps.student_first_byte)
    assert len(classes.teacher_class) == len(maps.teacher_first_byte)
    assert 0 <= classes.student_class.min() <= classes.student_class.max() < classes.num_classes
    assert -1 <= classes.teacher_class.min() <= classes.teacher_class.max() < classes.num_classes
    # Whatever a teacher says, some student token can earn it.
    assert set(classes.teacher_class.tolist()) - {-1} <= set(classes.student_class.tolist())
    for side in (classes.student_class, classes.teacher_class):
        masses = rng.dirichlet(np.ones(len(side)))
        lost = masses[side < 0].sum()
        assert push_forward(masses, side, classes.num_classes).sum() == pytest.approx(1 - lost, abs=1e-12)
    begins = defaultdict(set)
    for first_byte, side in (
        (maps.student_first_byte, classes.student_class),
        (maps.teacher_first_byte, classes.teacher_class),
    ):
        for byte, number in zip(first_byte.tolist(), side.tolist(), strict=True):
            begins[number].add(byte)
    assert all(len(bytes_) == 1 for number, bytes_ in begins.items() if number >= 0)


def check_projection(projection: TokenProjection, pieces: np.ndarray, num_other: int) -> None:
    assert len(projection.indptr) == len(pieces) + 1
    assert projection.indptr[-1] == len(projection.ids) == len(projection.weights)
    for row, begin, end in zip(pieces.tolist(), projection.indptr[:-1], projection.indptr[1:], strict=True):
        expected = defaultdict(float)
        kept = [piece for piece in row if piece >= 0]
        for place, piece in enumerate(kept):
            expected[piece] += 0.1**place / sum(0.1**n for n in range(len(kept)))
        found = dict(zip(projection.ids[begin:end].tolist(), projection.weights[begin:end].tolist(), strict=True))
        assert found == pytest.approx(dict(expected), rel=1e-6)
        assert sum(found.values()) == pytest.approx(1.0 if kept else 0.0, abs=1e-6)
        assert end - begin == len(found)
        assert all(0 <= piece < num_other for piece in found)


@given(vocabularies, vocabularies, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_maps_keep_their_promises(make, student_tokens, teacher_tokens, seed):
    student, teacher = make(student_tokens), make(teacher_tokens)
    maps = build_maps(student, teacher)
    rng = np.random.default_rng(seed)
    check_classes(maps.classes, maps, rng)
    check_classes(maps.first_byte, maps, rng)
    check_projection(maps.student_to_teacher, maps.student_pieces, teacher.vocab_size)
    check_projection(maps.teacher_to_student, maps.teacher_pieces, student.vocab_size)
    table = {data: token for token, data in reversed(list(enumerate(teacher.token_bytes))) if data}
    for token, data in enumerate(student.token_bytes):
        if data:
            assert maps.common[token] == table.get(data, -1)
            assert data.startswith(teacher.token_bytes[maps.first_teacher[token]])
    # The name of a class begins all tokens of the student in it.
    for token, number in enumerate(maps.classes.student_class.tolist()):
        name = maps.class_tokens[number]
        if student.token_bytes[token]:
            assert student.token_bytes[token].startswith(teacher.token_bytes[name])


@given(vocabularies)
@settings(max_examples=30, deadline=None)
def test_maps_of_equal_vocabularies_are_the_identity(make, tokens):
    check_identity(build_maps(make(tokens), make(tokens)))


@pytest.mark.parametrize("kind", ["bytelevel", "metaspace"])
def test_maps_of_equal_real_vocabularies_are_the_identity(kind, request):
    tokenizer = request.getfixturevalue(kind)
    check_identity(build_maps(tokenizer, tokenizer))


def check_identity(maps: VocabularyMaps) -> None:
    everything = np.arange(len(maps.common))
    assert maps.common.tolist() == everything.tolist()
    assert maps.classes.num_classes == len(everything)
    assert sorted(maps.classes.student_class.tolist()) == everything.tolist()
    assert maps.classes.student_class.tolist() == maps.classes.teacher_class.tolist()
    assert maps.student_to_teacher.ids.tolist() == everything.tolist()


def test_pieces_weigh_as_published(make):
    student = make(("a", "b", "ab", "aba", "abab", "ababa", "aaa"))
    maps = build_maps(student, make(("a", "b", "1", "!")))
    weights = {}
    for token, data in enumerate(student.token_bytes):
        begin, end = maps.student_to_teacher.indptr[token : token + 2]
        weights[data] = maps.student_to_teacher.weights[begin:end].round(4).tolist()
    assert weights[b"a"] == [1.0]
    assert weights[b"ab"] == pytest.approx([0.9091, 0.0909])
    # "a" comes twice: .9009 and .0090 in one entry.
    assert weights[b"aba"] == pytest.approx([0.9099, 0.0901], abs=1e-4)
    assert weights[b"abab"] == pytest.approx([0.9091, 0.0909], abs=1e-4)
    assert weights[b"ababa"] == weights[b"abab"]
    assert weights[b"aaa"] == [1.0]


def test_byte_tokens_stand_behind_those_that_texts_hold(bytelevel, metaspace):
    letter, byte_token = (metaspace._cutter.id_of(spelling) for spelling in ("e", "<0x65>"))
    assert metaspace.token_bytes[letter] == metaspace.token_bytes[byte_token] == b"e"
    assert byte_token < letter
    there, back = build_maps(metaspace, bytelevel), build_maps(bytelevel, metaspace)
    same = bytelevel.token_bytes.index(b"e")
    assert there.common[letter] == there.common[byte_token] == same
    assert back.common[same] == back.first_teacher[same] == letter
    assert there.first_student[same] == letter


def test_special_tokens_meet_by_role(bytelevel, metaspace):
    maps = build_maps(metaspace, bytelevel)
    for role in ("eos", "bos", "end_of_turn"):
        student, teacher = getattr(metaspace.roles, role), getattr(bytelevel.roles, role)
        assert maps.common[student] == maps.first_teacher[student] == teacher
        assert maps.first_student[teacher] == student
        assert maps.classes.student_class[student] == maps.classes.teacher_class[teacher]
        assert maps.first_byte.student_class[student] == maps.first_byte.teacher_class[teacher] >= 256
    assert len(set(map(tuple, maps.role_pairs.tolist()))) == len(maps.role_pairs) == 3


def test_first_byte_classes_are_first_bytes(bytelevel, metaspace):
    classes = build_maps(metaspace, bytelevel).first_byte
    for tokenizer, side in ((metaspace, classes.student_class), (bytelevel, classes.teacher_class)):
        for data, number in zip(tokenizer.token_bytes, side.tolist(), strict=True):
            assert data is None or number == data[0]


def shared_tokens(student: Tokenizer, teacher: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the tokens of both sides that begin at the same byte of some texts."""
    keys, ids = [], []
    for tokenizer in (student, teacher):
        cut = tokenizer.tokenize([Document((Segment("text", " ".join(TEXTS)),))])[0]
        keys.append(np.cumsum(cut.byte_lengths)[cut.byte_lengths > 0])
        ids.append(cut.ids[cut.byte_lengths > 0])
        keys[-1] = np.concatenate([[0], keys[-1][:-1]])
    _, student_places, teacher_places = np.intersect1d(*keys, return_indices=True)
    return ids[0][student_places], ids[1][teacher_places]


def test_realised_tokens_of_a_text_are_in_one_class(bytelevel, metaspace, wordpiece):
    for student, teacher, least in (
        (metaspace, bytelevel, 0.93),
        (bytelevel, metaspace, 0.93),
        (wordpiece, bytelevel, 0.8),
    ):
        maps = build_maps(student, teacher)
        student_ids, teacher_ids = shared_tokens(student, teacher)
        assert len(student_ids) > 40
        for classes, floor in ((maps.classes, least), (maps.first_byte, 0.95)):
            same = classes.student_class[student_ids] == classes.teacher_class[teacher_ids]
            assert same.mean() >= floor, (classes.num_classes, same.mean())


def test_a_table_read_as_another_kind_is_refused(tmp_path, folder, bytelevel):
    misread = json.loads((folder / "bytelevel" / "tokenizer.json").read_text())
    misread["decoder"] = misread["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "always",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(misread))
    misread = Tokenizer.from_folder(tmp_path)
    for pair in ((misread, bytelevel), (bytelevel, misread)):
        with pytest.raises(VocabularyError, match=r"begin with 'Ġ'.*ByteLevel.*was read as another kind") as caught:
            build_maps(*pair)
        assert "\n" not in str(caught.value)
        assert misread.fingerprint[:12] in str(caught.value)


def test_metaspace_read_as_bytelevel_is_refused(tmp_path, folder, bytelevel):
    misread = json.loads((folder / "metaspace" / "tokenizer.json").read_text())
    misread["decoder"] = {
        "type": "ByteLevel",
        **dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), False),
    }
    # Words of a real vocabulary: most begin with a space, and no ByteLevel spelling has that sign.
    words = [f"▁word{number}" for number in range(3000)]
    misread["model"]["vocab"].update({word: 700 + number for number, word in enumerate(words)})
    (tmp_path / "tokenizer.json").write_text(json.dumps(misread))
    with pytest.raises(VocabularyError, match=r"ordinary tokens have bytes, expected at least 40%"):
        build_maps(bytelevel, Tokenizer.from_folder(tmp_path))


def test_vocabularies_with_next_to_nothing_in_common_are_refused(make):
    some, others = [tuple(f"{letter}{n:03}" for n in range(200)) for letter in "xy"]
    with pytest.raises(VocabularyError, match=r"\(200 tokens\) and .*\(200 tokens\) have 0 tokens of the same bytes"):
        build_maps(make(some), make(others))
    with pytest.raises(VocabularyError, match=r"have 3 tokens of the same bytes, expected at least 2%"):
        build_maps(make((*some, "a", "b", "1")), make((*others, "a", "b", "1")))
    assert len(build_maps(make((*some, *"ab1!c")), make((*others, *"ab1!c"))).role_pairs) > 0


def test_maps_are_kept_once_for_each_pair(store, bytelevel, metaspace, monkeypatch):
    made = vocabulary_maps(store, metaspace, bytelevel)
    assert store.answer(maps_recipe(metaspace, bytelevel)).result == {"maps": made.digest}
    before = sorted(store.storage.list(""))
    monkeypatch.setattr("logitstore.vocabulary_maps.build_maps", lambda *_: pytest.fail("made again"))
    found = vocabulary_maps(store, metaspace, bytelevel)
    assert found.to_asset() == made.to_asset() == read_maps(store, made.digest).to_asset()
    assert sorted(store.storage.list("")) == before
    assert verify(store).faults == ()


def test_maps_depend_on_the_tokenizers_alone(folder, bytelevel, metaspace):
    again = [Tokenizer.from_folder(folder / kind) for kind in ("metaspace", "bytelevel")]
    assert build_maps(*again).digest == build_maps(metaspace, bytelevel).digest
    assert build_maps(bytelevel, metaspace).digest != build_maps(metaspace, bytelevel).digest


def test_maps_are_read_only(bytelevel, metaspace):
    maps = build_maps(metaspace, bytelevel)
    for values in (maps.common, maps.first_teacher, maps.classes.student_class, maps.student_to_teacher.weights):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 0


def test_damaged_and_missing_maps_are_made_again(store, bytelevel, metaspace):
    digest = vocabulary_maps(store, metaspace, bytelevel).digest
    path = Path(store.storage.url) / "assets" / digest
    for spoil in (lambda: path.write_bytes(b"x"), path.unlink):
        spoil()
        with pytest.raises(DamageError):
            read_maps(store, digest)
        assert len(verify(store).faults) == 1
        assert vocabulary_maps(store, metaspace, bytelevel).digest == digest
        assert verify(store).faults == ()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("common", lambda values: values[:-1]),
        ("common", lambda values: np.full_like(values, 10**6)),
        ("teacher_pieces", lambda values: np.full_like(values, -2)),
        ("role_pairs", lambda values: values[:, :1]),
        ("role_pairs", lambda values: values + 10**5),
        ("student_first_byte", lambda values: values + 256),
        ("teacher_first_byte", lambda values: values[:5]),
    ],
)
def test_impossible_maps_are_refused(bytelevel, metaspace, name, change):
    maps = build_maps(metaspace, bytelevel)
    spoilt = VocabularyMaps(**{**vars_of(maps), name: change(getattr(maps, name))})
    with pytest.raises(DamageError, match=r"^here: impossible maps: .*verify"):
        VocabularyMaps.from_asset(spoilt.to_asset(), "here")


def vars_of(maps: VocabularyMaps) -> dict[str, object]:
    return {name: getattr(maps, name) for name in VocabularyMaps.__dataclass_fields__}


def test_maps_of_another_version_are_refused(bytelevel, metaspace, monkeypatch):
    monkeypatch.setattr("logitstore.vocabulary_maps.MAPS_VERSION", "99")
    data = build_maps(metaspace, bytelevel).to_asset()
    monkeypatch.undo()
    with pytest.raises(DamageError, match=r"expected logitstore.vocabulary_maps of version 1, found .*99"):
        VocabularyMaps.from_asset(data, "here")
    with pytest.raises(DamageError, match="not an object of named arrays"):
        VocabularyMaps.from_asset(data[:-1], "here")


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    return fill_store(str(tmp_path_factory.mktemp("filled") / "store"), tmp_path_factory.mktemp("inputs"))[0]


def stored_tokenizers(store: Store) -> list[Tokenizer]:
    """Those of the dataset's tokens columns."""
    columns = store.dataset(next(iter(store.datasets()))).manifest.find("tokens")
    return [Tokenizer.from_asset(store.asset(column.template["tokenizer"])) for column in columns]


def test_maps_stay_while_both_tokenizers_do(filled, tmp_path, bytelevel):
    shutil.copytree(filled.storage.url, tmp_path / "store")
    store = Store.open(str(tmp_path / "store"))
    one, other = stored_tokenizers(store)[:2]
    kept = vocabulary_maps(store, one, other)
    stray = vocabulary_maps(store, bytelevel, other)
    for days in (8, 16):
        collect(store, 7 * DAY, now=time.time() + days * DAY)
    assets = {name.split("/")[1] for name in store.storage.list("assets")}
    assert kept.digest in assets
    assert stray.digest not in assets
    assert store.answer(maps_recipe(one, other)) is not None
    assert store.answer(maps_recipe(bytelevel, other)) is None
    assert verify(store).faults == ()
    assert vocabulary_maps(store, bytelevel, other).digest == stray.digest


def test_repair_gives_up_damaged_maps(store, bytelevel, metaspace):
    digest = vocabulary_maps(store, metaspace, bytelevel).digest
    (Path(store.storage.url) / "assets" / digest).write_bytes(b"x")
    repaired = repair(store, verify(store))
    assert repaired.dropped == [f"assets/{digest}"]
    assert verify(store).faults == ()
    assert vocabulary_maps(store, metaspace, bytelevel).digest == digest
