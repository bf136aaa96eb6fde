"""Images in prompts: parts are found and named, templates show them in their places, and engine and picker hash the same."""

import base64
import hashlib

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import BundleError, PromptError
from penstock.prompt.hashing import BlockHasher, ExtraKeys
from penstock.prompt.image_size import DynamicSize, TiledSize, TowerCost
from penstock.prompt.images import ImagePart, ImageRules, image_name, place
from penstock.prompt.memo import PrefixMemo
from penstock.prompt.processor import CHAT_PATH, RESPONSES_PATH, PromptProcessor

PARTS = (
    "{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n"
    "{% endfor %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
MIXED = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
STRINGS = "{% for m in messages %}{{ m.content }};{% endfor %}"


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image(data: bytes = b"one", **fields) -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(data), **fields}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def processor(
    template: str = MIXED, tokens: int = 5, images: bool = True, ends: tuple[str, str] | None = None, **fields
) -> PromptProcessor:
    """`ends`: what a template writes for an image, and what ends one in the prompt."""
    tokenizer = Tokenizer(
        models.BPE(vocab={char: at for at, char in enumerate(sorted(set(map(chr, range(10, 127)))))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<image>", *(ends or ())])
    token_id = tokenizer.token_to_id("<image>")
    begin, end = (None, None) if ends is None else map(tokenizer.token_to_id, ends)
    return PromptProcessor(
        PromptBundle(
            served_names=("m",),
            tokenizer=tokenizer.to_str(),
            chat_template=template,
            special_tokens={},
            block_size=4,
            hash_seed="s",
            max_model_len=4096,
            images=ImageRules(token_id=token_id, tokens=tokens, begin_id=begin, end_id=end, **fields) if images else None,
        )
    )


def user(*content) -> dict:
    return {"messages": [{"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("template", "expected"),
    [(PARTS, "user: <image>\n<image>\na c user: d a:"), (MIXED, "a<image>c<image>;d;"), (STRINGS, "a\n<image>\nc\n<image>;d;")],
)
def test_templates_show_images_whatever_form_of_content_they_read(template, expected):
    body = {"messages": [user(text("a"), image(), text("c"), image())["messages"][0], {"role": "user", "content": "d"}]}
    assert processor(template).render_chat(body) == expected


def test_a_text_model_gets_strings_and_refuses_images_by_their_part():
    plain = processor(MIXED, images=False)
    assert plain.render_chat(user(text("a"), text("b"))) == "a\nb;"
    with pytest.raises(PromptError, match="this model reads text alone") as caught:
        plain.tokens_of(CHAT_PATH, user(text("a"), image()))
    assert caught.value.param == "messages[0].content[1]"
    assert plain.images_of(CHAT_PATH, user(image())) == []


def test_a_continued_message_may_have_images():
    body = user(image(), text("the river")) | {"continue_final_message": True}
    assert processor(PARTS).render_chat(body) == "user: <image>\nthe river"


def test_parts_are_named_in_the_words_of_their_api():
    chat = {
        "messages": [{"role": "system", "content": "x"}, user(text("a"), image(b"1"), image(b"2", detail="high"))["messages"][0]]
    }
    found = processor().images_of(CHAT_PATH, chat)
    assert found == [
        ImagePart(data_url(b"1"), "messages[1].content[1].image_url.url"),
        ImagePart(data_url(b"2"), "messages[1].content[2].image_url.url"),
    ]
    url = {"type": "input_image", "image_url": data_url(b"1"), "detail": "auto"}
    body = {
        "instructions": "x",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, url]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [url]},
        ],
    }
    assert [part.param for part in processor().images_of(RESPONSES_PATH, body)] == [
        "input[0].content[1].image_url",
        "input[2].output[0].image_url",
    ]
    same = {"messages": [{"role": "system", "content": "x"}, user(text("a"), image(b"1"))["messages"][0]]}
    del body["input"][1:]
    assert processor().tokens_of(RESPONSES_PATH, body) == processor().tokens_of(CHAT_PATH, same)


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": "https://x/y"}, ".image_url"),
        ({"type": "image_url", "image_url": {"url": 5}}, ".image_url"),
        ({"type": "image_url"}, ".image_url"),
        (image(detail="huge"), ".image_url.detail"),
        (image(size=5), ".image_url.size"),
        (image() | {"uuid": "x"}, ".uuid"),
        ({"type": "video_url", "video_url": {"url": "x"}}, ""),
        ({"type": "input_audio", "input_audio": {}}, ""),
        ({"type": "input_image"}, ""),
        ("text", ""),
    ],
)
def test_bad_parts_are_refused_by_their_field(part, param):
    with pytest.raises(PromptError) as caught:
        processor().tokens_of(CHAT_PATH, user(text("a"), part))
    assert caught.value.param == f"messages[0].content[1]{param}"
    if isinstance(part, dict) and part["type"] in ("video_url", "input_audio"):
        assert part["type"] in str(caught.value)


def test_bad_parts_of_responses_are_refused_by_their_field():
    for part, param in (
        ({"type": "input_image"}, ".image_url"),
        ({"type": "input_image", "image_url": {"url": "x"}}, ".image_url"),
        ({"type": "input_image", "file_id": "x"}, ".file_id"),
        ({"type": "input_image", "image_url": "x", "detail": 1}, ".detail"),
        ({"type": "input_file"}, ""),
    ):
        with pytest.raises(PromptError) as caught:
            processor().tokens_of(RESPONSES_PATH, {"input": [{"role": "user", "content": [part]}]})
        assert caught.value.param == f"input[0].content[0]{param}"


def test_a_template_may_write_the_beginning_of_an_image_alone():
    one = processor(MIXED.replace("<image>", "<begin>"), ends=("<begin>", "<end>"))
    body = user(text("a\n"), image(), text("c"))
    assert one.render_chat(body) == "a\n\n\n<begin><image><end>\n\nc;"
    [ids] = one.tokens_of(CHAT_PATH, body)
    placed = one.place(CHAT_PATH, ids, [("x", 5)])
    assert (placed.items[0].start, placed.items[0].length) == (5, 5)
    for words in ("<image>", "<begin>"):
        [ids] = one.tokens_of(CHAT_PATH, user(text(words), image()))
        with pytest.raises(PromptError, match="2 placeholders for 1 images"):
            one.place(CHAT_PATH, ids, [("x", 5)])
    bundle = one.bundle
    assert bundle.images is not None
    with pytest.raises(BundleError, match="no token 5000, which ends an image"):
        PromptProcessor(msgspec.structs.replace(bundle, images=msgspec.structs.replace(bundle.images, end_id=5000)))


@pytest.mark.req("MM-02")
def test_each_placeholder_becomes_as_many_as_its_image_has_embeddings():
    placed = place([1, 9, 2, 9, 9], 9, [("a", 3), ("b", 1), ("a", 2)], "messages")
    assert placed.token_ids == [1, 9, 9, 9, 2, 9, 9, 9]
    assert [(item.identifier, item.start, item.length) for item in placed.items] == [("a", 1, 3), ("b", 5, 1), ("a", 6, 2)]
    for names in ([], [("a", 1)] * 2, [("a", 1)] * 4):
        with pytest.raises(PromptError, match=f"3 placeholders for {len(names)} images"):
            place([1, 9, 2, 9, 9], 9, names, "messages")


def test_a_text_that_holds_a_placeholder_is_refused():
    one = processor()
    body = user(text("see <image> here"), image())
    [ids] = one.tokens_of(CHAT_PATH, body)
    with pytest.raises(PromptError, match="2 placeholders for 1 images"):
        one.place(CHAT_PATH, ids, [("x", 5)])


def test_prompts_with_images_are_not_cut():
    with pytest.raises(PromptError, match="cannot be cut"):
        processor().tokens_of(CHAT_PATH, user(image()) | {"truncate_prompt_tokens": 3})


def test_a_placeholder_that_the_tokenizer_lacks_is_refused():
    bundle = processor().bundle
    with pytest.raises(BundleError, match="no token 5000"):
        PromptProcessor(msgspec.structs.replace(bundle, images=ImageRules(token_id=5000, tokens=1)))
    sizes = (None, DynamicSize(factor=8, min_pixels=64, max_pixels=4096), TiledSize(tile=8, side=2, resolutions=((8, 16),)))
    for size in sizes:
        other = msgspec.structs.replace(bundle, images=ImageRules(token_id=1, tokens=1, size=size))
        assert PromptBundle.from_json(other.to_json()) == other


@pytest.mark.req("MM-04", "MM-07")
def test_the_picker_hashes_what_the_engine_hashes_without_decoding():
    """These files are no images at all."""
    one = processor(tokens=6)
    memo, hasher, extra = PrefixMemo(one), BlockHasher(4, "s"), ExtraKeys(tenant="t")
    body = user(text("abc"), image(b"1"), text("defgh"), image(b"2"), text("ijk"))
    [ids] = one.tokens_of(CHAT_PATH, body)
    names = [image_name(b"1"), image_name(b"2")]
    assert names[0] == hashlib.sha256(b"1").hexdigest()
    placed = one.place(CHAT_PATH, ids, [(name, 6) for name in names])
    [hashed] = memo.hashed(CHAT_PATH, body, extra)
    expected = tuple(hasher.hash(placed.token_ids, msgspec.structs.replace(extra, items=placed.items)))
    assert hashed == (len(placed.token_ids), expected, ((9, 0), (20, 0)))
    [again] = memo.hashed(CHAT_PATH, body, extra)
    [other] = memo.hashed(CHAT_PATH, user(text("abc"), image(b"1"), text("defgh"), image(b"3"), text("ijk")), extra)
    assert again == hashed
    shared = [a == b for a, b in zip(hashed.block_hashes, other.block_hashes, strict=True)]
    assert shared == [True] * 3 + [False] * (len(shared) - 3)
    [fetched] = memo.hashed(
        CHAT_PATH, user(text("abc"), image(b"1"), text("defgh"), {**image(), "image_url": {"url": "https://x/y"}}), extra
    )
    assert (fetched.tokens, fetched.block_hashes) == (21, hashed.block_hashes[:3])
    with pytest.raises(PromptError, match="base64"):
        memo.hashed(CHAT_PATH, user({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}), extra)


@pytest.mark.req("MM-05")
def test_an_id_within_a_file_never_stands_for_its_pixels():
    """EXIF's ImageUniqueID is anybody's to write: files that carry the same one are different images."""
    exif = b"Exif\0\0II*\0" + bytes.fromhex("08000000010020a40200210000001a000000") + bytes(4) + b"0123456789abcdef" * 2 + b"\0"
    files = [b"\xff\xd8\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + pixels for pixels in (b"one", b"two")]
    one, extra = processor(tokens=6), ExtraKeys()
    [first], [second] = (PrefixMemo(one).hashed(CHAT_PATH, user(image(data)), extra) for data in files)
    assert image_name(files[0]) != image_name(files[1])
    assert not set(first.block_hashes) & set(second.block_hashes)


@pytest.mark.req("MM-04")
def test_a_request_may_choose_the_size_of_its_images_which_is_part_of_their_names():
    one = processor(tokens=64, size=DynamicSize(factor=8, min_pixels=64, max_pixels=4096))
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (24).to_bytes(4, "big") + (32).to_bytes(4, "big")
    bodies = [
        user(image(header)) | {"mm_processor_kwargs": given}
        for given in ({"max_pixels": 512, "min_pixels": 64}, {"min_pixels": 64, "max_pixels": 512}, {"max_pixels": 4096}, None)
    ]
    small, same, usual, silent = (PrefixMemo(one).hashed(CHAT_PATH, body, ExtraKeys())[0] for body in bodies)
    assert small == same != usual == silent
    assert (small.tokens, usual.tokens) == (6 + 1, 12 + 1)
    assert small.block_hashes != usual.block_hashes[: len(small.block_hashes)]
    for rules, given, words in (
        (one, [], "must be an object"),
        (one, {"fps": 2}, "fps is not supported: this model takes max_pixels and min_pixels"),
        (one, {"max_pixels": "1"}, "max_pixels must be a whole number"),
        (one, {"max_pixels": 4097}, "must be 64 to 4096"),
        (one, {"min_pixels": 63}, "must be 64 to 4096"),
        (one, {"min_pixels": 128, "max_pixels": 64}, "the former no more"),
        (processor(), {"max_pixels": 64}, "this model takes none"),
        (processor(images=False), {"max_pixels": 64}, "this model takes none"),
    ):
        with pytest.raises(PromptError, match=words) as caught:
            rules.images_of(CHAT_PATH, user(text("a")) | {"mm_processor_kwargs": given})
        assert caught.value.param.startswith("mm_processor_kwargs")


def test_images_of_any_size_are_counted_by_their_headers():
    """The picker reads no further, and knows nothing from an image on whose header says nothing."""
    cost = TowerCost(0.25, 0.001)
    one = processor(tokens=64, size=DynamicSize(factor=8, min_pixels=64, max_pixels=4096), cost=cost)
    memo, hasher, extra = PrefixMemo(one), BlockHasher(4, "s"), ExtraKeys(tenant="t")
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (24).to_bytes(4, "big") + (32).to_bytes(4, "big") + b"no pixels"
    body = user(text("abc"), image(header), text("defgh"), image(b"nothing"), text("ijk"))
    [ids] = one.tokens_of(CHAT_PATH, body)
    placed = one.place(CHAT_PATH, ids, [(image_name(header), 12), ("", 64)])
    expected = hasher.hash(placed.token_ids[:20], msgspec.structs.replace(extra, items=placed.items[:1]))
    # The cost of an image that is there twice counts once, up to where its last one ends.
    runs = ((15, cost.tokens(24 * 32)), (20 + 64, cost.tokens(64 * 64)))
    assert memo.hashed(CHAT_PATH, body, extra) == [(len(placed.token_ids), tuple(expected), runs)]
    [twice] = memo.hashed(CHAT_PATH, user(image(header), text("x"), image(header)), extra)
    assert twice.images == ((12 + 1 + 12, cost.tokens(24 * 32)),)
    assert placed.items[1].start == 20
