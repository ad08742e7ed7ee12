"""The character tokenizer: sizes, round trips, and agreement with transformers on the saved folder."""

import json
import random
import subprocess
import sys

import pytest

from harness.models.tokenizer import (
    ALPHABET,
    BOS_ID,
    DIGIT_0_ID,
    EOS_ID,
    PAD_ID,
    SPECIAL,
    char_tokenizer,
    decode,
    encode,
    save_tokenizer,
)


@pytest.mark.parametrize("size", [32, 128])
def test_vocabulary_is_exactly_its_size_and_shared(size):
    tokenizer = char_tokenizer(size)
    assert len(tokenizer) == len(tokenizer.tokens) == len(tokenizer.ids) == size
    assert tokenizer.tokens[:32] == char_tokenizer(32).tokens
    assert tokenizer.encode("\n") == [8]
    assert [tokenizer.encode(str(d)) for d in range(10)] == [[DIGIT_0_ID + d] for d in range(10)]
    assert tokenizer.tokens[:3] == SPECIAL


def test_the_large_vocabulary_covers_printable_ascii():
    text = "".join(map(chr, range(0x20, 0x7F)))
    assert decode(encode(text, 128), 128) == text


def test_known_ids():
    assert encode("<bos>31=\n<eos><pad>") == [BOS_ID, 13, 11, 3, 8, EOS_ID, PAD_ID]
    assert encode("1<2>0") == [11, 28, 12, 29, 10]
    assert decode([2, 13, 11, 3, 1]) == "<bos>31=<eos>"


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="character 'z' is not in the 32-token vocabulary"):
        encode("12z")
    with pytest.raises(ValueError, match=r"vocab_size 64 .*32, 128"):
        char_tokenizer(64)


@pytest.fixture(params=[32, 128])
def loaded(request, tmp_path):
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path, request.param)
    return request.param, AutoTokenizer.from_pretrained(tmp_path)


def test_transformers_agrees(loaded):
    size, theirs = loaded
    ours = char_tokenizer(size)
    assert len(theirs) == theirs.vocab_size == size
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.bos_token_id) == (PAD_ID, EOS_ID, BOS_ID)
    rng = random.Random(0)
    for length in range(40):
        ids = [rng.randrange(size) for _ in range(length)]
        text = ours.decode(ids)
        assert theirs.decode(ids) == text
        assert theirs(text)["input_ids"] == ours.encode(text) == ids
    assert theirs.decode(ours.encode("<bos>12=<eos>"), skip_special_tokens=True) == "12="
    assert theirs.convert_ids_to_tokens(range(size)) == list(ours.tokens)


def test_chat_template_adds_only_bos(loaded):
    _, theirs = loaded
    message = [{"role": "user", "content": "31415926="}]
    ids = theirs.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids == encode("<bos>31415926=")


def test_batch_padding_is_on_the_left(loaded):
    _, theirs = loaded
    assert theirs(["12", "3"], padding=True)["input_ids"] == [[11, 12], [PAD_ID, 13]]


def test_files_are_plain_json_of_the_alphabet(tmp_path):
    save_tokenizer(tmp_path)
    vocab = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(32))
    assert [vocab[char] for char in ALPHABET] == list(range(3, 32))
    assert json.loads((tmp_path / "special_tokens_map.json").read_text())["eos_token"] == "<eos>"


def test_hot_path_imports_no_tokenizer_library():
    code = (
        "import sys, harness.models.tokenizer as t; t.encode('1='); "
        "print([m for m in ('tokenizers', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
