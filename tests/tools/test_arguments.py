import json
import sys
import time

import pytest
from PIL import Image

from opensearch_lightning.errors import ConfigurationError, DataError, ToolError
from opensearch_lightning.tools import ImageBook, offline_tools
from opensearch_lightning.tools.arguments import check_arguments
from opensearch_lightning.tools.schemas import ARGUMENT_ALIASES, CROP, IMAGE_ID, crop_schema
from opensearch_lightning.types import ErrorKind
from tests.tools.fakes import book, schema


class World:
    text_index = None
    image_index = None


SCHEMAS = {tool.name: tool.schema for tool in offline_tools(World())}
BOX = {"image": "img_1", "x": 1, "y": 2, "width": 3, "height": 4}


def check(tool, arguments, images=None):
    return check_arguments(SCHEMAS[tool], arguments, ARGUMENT_ALIASES[tool], images or book())


def refused(tool, arguments):
    with pytest.raises(ToolError) as caught:
        check(tool, arguments)
    return caught.value.kind, caught.value.message


def test_wire_names_and_arguments_of_the_recipe():
    def parameters(name):
        function = SCHEMAS[name]["function"]
        return set(function["parameters"]["properties"]), set(function["parameters"]["required"])

    assert list(SCHEMAS) == [
        "text_search", "image_search", "layout_parsing", "crop", "sharpen", "super_resolution", "perspective_correct",
    ]  # fmt: skip
    assert parameters("text_search") == ({"q", "hl", "top_k"}, {"q"})
    assert parameters("image_search") == ({"url", "top_k"}, {"url"})
    assert parameters("layout_parsing") == (
        {"image", "use_chart_recognition", "use_doc_orientation_classify"},
        {"image"},
    )
    assert parameters("crop") == (set(BOX), set(BOX))
    assert parameters("sharpen") == ({"image", "amount"}, {"image"})
    assert parameters("super_resolution") == ({"image", "scale"}, {"image"})
    assert parameters("perspective_correct") == ({"image"}, {"image"})
    assert all(schema["type"] == "function" and json.dumps(schema) for schema in SCHEMAS.values())


def test_defaults_of_the_recipe():
    assert check("text_search", {"q": "x"}).values == {"q": "x", "hl": "en", "top_k": 5}
    assert check("sharpen", {"image": "img_1"}).values == {"image": "img_1", "amount": 1.5}
    assert check("super_resolution", {"image": "img_1"}).values == {"image": "img_1", "scale": 4}
    assert check("layout_parsing", {"image": "img_1"}).values == {
        "image": "img_1", "use_chart_recognition": False, "use_doc_orientation_classify": False,
    }  # fmt: skip


def test_aliases():
    assert check("text_search", {"query": "x", "lang": "zh"}).values == {"q": "x", "hl": "zh", "top_k": 5}
    assert check("image_search", {"image": "img_1"}).values["url"] == "img_1"
    assert check("crop", {**BOX, "url": "img_1"}).values == BOX
    assert refused("text_search", {"q": "a", "query": "b"}) == (
        ErrorKind.INVALID_ARGUMENT, 'q is given twice, as "a" and "b".',
    )  # fmt: skip


def test_numbers_one_way_or_the_other_are_equal():
    checked = check("crop", {**BOX, "x": 1.0, "y": 2.5})
    assert checked.values == {**BOX, "x": 1, "y": 2.5}
    assert json.dumps(checked.values) == json.dumps({**BOX, "y": 2.5})
    assert check("super_resolution", {"image": "img_1", "scale": 2.0}).values["scale"] == 2


def test_a_relative_box_is_limited_by_its_schema():
    schema = crop_schema("relative_1000")
    images = book()
    assert check_arguments(schema, {**BOX, "x": 0, "width": 1000}, {}, images).values["width"] == 1000
    for name, value in (("x", -1), ("y", 1000.5), ("width", 1001), ("height", 0)):
        with pytest.raises(ToolError, match=f"{name} must be "):
            check_arguments(schema, {**BOX, name: value}, {}, images)
    assert crop_schema() == CROP
    with pytest.raises(ConfigurationError, match="coordinates is 'thousandths'"):
        crop_schema("thousandths")


@pytest.mark.parametrize(
    "value", [None, "10%", "10", float("nan"), float("inf"), -float("inf"), True, [1], {"a": 1}, 10**400, 1e300]
)
def test_no_numbers(value):
    kind, message = refused("crop", {**BOX, "x": value})
    assert kind is ErrorKind.INVALID_ARGUMENT
    assert message.startswith("x must be a number, not ")
    assert len(message) < 80


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("crop", {**BOX, "width": -5}, "width must be above 0, not -5."),
        ("crop", {**BOX, "height": 0}, "height must be above 0, not 0."),
        ("crop", {"image": "img_1", "x": 1, "y": 2, "width": 3}, "height is missing."),
        ("crop", {**BOX, "image": ["img_1"]}, 'image must be a string, not ["img_1"].'),
        ("crop", {**BOX, "image": None}, "image must be a string, not null."),
        ("crop", {}, "image is missing."),
        ("text_search", {"q": "  "}, "q is empty."),
        ("text_search", {"q": ["a"]}, 'q must be a string, not ["a"].'),
        ("text_search", {"q": "\ud800"}, "q holds half a character."),
        ("text_search", {"q": "x", "top_k": 0}, "top_k must be at least 1, not 0."),
        ("text_search", {"q": "x", "top_k": 2.5}, "top_k must be a whole number, not 2.5."),
        ("text_search", {"q": "x", "top_k": 1000}, "top_k must be at most 20, not 1000."),
        ("layout_parsing", {"image": "img_1", "use_chart_recognition": 1},
         "use_chart_recognition must be true or false, not 1."),
        ("super_resolution", {"image": "img_1", "scale": 400}, "scale must be at most 4, not 400."),
    ],
)  # fmt: skip
def test_invalid_arguments(tool, arguments, message):
    assert refused(tool, arguments) == (ErrorKind.INVALID_ARGUMENT, message)


@pytest.mark.parametrize(
    "name", ["img_2", "img_0", "IMG_1", "", "/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/x.png", "img_01"]
)
def test_images_go_by_id_only(name):
    kind, message = refused("sharpen", {"image": name})
    assert kind is ErrorKind.UNKNOWN_IMAGE
    assert "known: img_1" in message


def test_unknown_arguments_are_told():
    checked = check("text_search", {"q": "x", "meta": {"a": {}}})
    assert checked.ignored == ("meta",)
    assert "meta" not in checked.values


def test_image_arguments_are_marked():
    assert CROP["function"]["parameters"]["properties"]["image"]["format"] == IMAGE_ID


def test_book_names_in_order_and_lists_them():
    images = ImageBook()
    with pytest.raises(ToolError, match="there are no images"):
        images.get("img_1")
    assert images.next_name == "img_1"
    assert [images.add(Image.new("RGB", (2, 2))) for _ in range(3)] == ["img_1", "img_2", "img_3"]
    assert len(images) == 3
    with pytest.raises(ToolError, match="known: img_1 to img_3"):
        images.get("img_9")


def test_book_makes_rgb_of_everything(tmp_path):
    images = ImageBook()
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    images.add((tmp_path / "clear.png").read_bytes())
    images.add(Image.new("L", (4, 4), 7))
    assert images.get("img_1").getpixel((0, 0)) == (255, 255, 255)
    assert images.get("img_2").getpixel((0, 0)) == (7, 7, 7)
    with pytest.raises(DataError, match="img_3 cannot be read"):
        images.add(b"no image")


def test_digest_is_of_the_content():
    images = book(Image.new("RGB", (4, 2), "red"), Image.new("RGB", (4, 2), "red"), Image.new("RGB", (2, 4), "red"))
    assert images.digest("img_1") == images.digest("img_2") != images.digest("img_3")


def of_server(properties, **keywords):
    parameters = {"type": "object", "properties": properties, **keywords}
    return {"type": "function", "function": {"name": "tool", "description": "", "parameters": parameters}}


def refusal(schema, arguments):
    with pytest.raises(ToolError) as caught:
        check_arguments(schema, arguments, {}, book())
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    return caught.value.message


TREE = {"type": "object", "properties": {"name": {"type": "string"}, "below": {"$ref": "#/$defs/tree"}},
        "required": ["name"], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "right", "wrong", "message"),
    [
        ({"type": "array", "items": {"type": "integer"}}, [1, 2], [1, "2"], 'a[1] must be of type integer, not "2".'),
        ({"type": "array", "maxItems": 1}, [1], [1, 2], 'a must fit {"maxItems": 1}, not [1, 2].'),
        ({"type": ["string", "null"]}, None, 5, "a must be of type string or null, not 5."),
        ({"anyOf": [{"type": "integer"}, {"type": "array"}]}, [5], "x",
         'a must fit {"anyOf": [{"type": "integer"}, {"type": "array"}]}, not "x".'),
        ({"type": "string", "maxLength": 2}, "ab", "abc", 'a must fit {"maxLength": 2}, not "abc".'),
        ({"type": "string", "minLength": 3}, "abc", " a ", "a must have 3 characters or more, not 1."),
        ({"type": "number", "exclusiveMaximum": 3}, 2.5, 3, 'a must fit {"exclusiveMaximum": 3}, not 3.'),
        ({"const": 7}, 7, 8, 'a must fit {"const": 7}, not 8.'),
        ({"type": "object", "required": ["b"]}, {"b": None}, {}, 'a lacks ["b"].'),
        ({"$ref": "#/$defs/tree"}, {"name": "x", "below": {"name": "y"}}, {"name": "x", "below": {}},
         'a.below lacks ["name"].'),
        ({}, {"any": ["thing"]}, [float("nan")], "a holds NaN or infinity, which are no numbers."),
        ({"type": "array"}, ["\U0001f600"], ["\ud83d"], "a holds half a character."),
    ],
)  # fmt: skip
def test_rules_of_json_schema(rule, right, wrong, message):
    schema = of_server({"a": rule}, **{"$defs": {"tree": TREE}})
    assert check_arguments(schema, {"a": right}, {}, book()).values == {"a": right}
    assert refusal(schema, {"a": wrong}) == message


def test_messages_stay_short():
    rule = {"type": "array", "items": {"anyOf": [{"const": "x" * 200}, {"const": "y" * 200}]}}
    message = refusal(of_server({"a": rule}), {"a": ["\n" + "z" * 5000]})
    assert message.startswith("a[0] must fit ")
    assert len(message) < 180
    assert "\n" not in message


def test_rules_between_arguments():
    schema = of_server(
        {"a": {"type": "string"}, "b": {"type": "string"}}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]
    )
    assert check_arguments(schema, {"b": "x"}, {}, book()).values == {"b": "x"}
    assert refusal(schema, {}).startswith("the call must fit ")


def test_other_names_where_the_schema_takes_them():
    schema = of_server({}, additionalProperties={"type": "integer"})
    checked = check_arguments(schema, {"one": 1}, {}, book())
    assert (checked.values, checked.ignored) == ({"one": 1}, ())
    assert refusal(schema, {"one": "1"}) == 'one must be a whole number, not "1".'
    assert refusal(schema, {"\ud800": 1}) == 'The name "?" holds half a character.'
    assert check_arguments(of_server({}, additionalProperties=False), {"one": 1}, {}, book()).ignored == ("one",)


def test_nothing_is_fetched_for_a_rule(monkeypatch):
    tried = []
    monkeypatch.setattr("socket.socket.connect", lambda *address: tried.append(address))
    monkeypatch.setattr("urllib.request.urlopen", lambda *address, **_: tried.append(address))
    schema = of_server({"a": {"$ref": "http://127.0.0.1:9/schema.json"}})
    # a rule that cannot be looked up is not held against the policy
    assert check_arguments(schema, {"a": 1}, {}, book()).values == {"a": 1}
    assert tried == []


@pytest.mark.parametrize("rule", [{"$ref": "#/$defs/none"}, {"$ref": "#"}], ids=str)
def test_a_rule_that_cannot_be_applied_is_logged(rule, caplog):
    schema = of_server({"a": {"$ref": "#/properties/a"} if rule == {"$ref": "#"} else rule})
    assert check_arguments(schema, {"a": "x"}, {}, book()).values == {"a": "x"}
    assert "The rule of a cannot be checked" in caplog.text


def test_without_jsonschema_only_plain_rules_are_checked(monkeypatch):
    for module in ("jsonschema", "jsonschema.exceptions", "jsonschema.validators"):
        monkeypatch.setitem(sys.modules, module, None)
    schema = of_server(
        {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "integer", "multipleOf": 2}}
    )
    assert check_arguments(schema, {"a": ["x"], "b": 3}, {}, book()).values == {"a": ["x"], "b": 3}
    assert refusal(schema, {"b": "x"}) == 'b must be a whole number, not "x".'


def test_no_regular_expression_of_a_schema_holds_up_the_loop():
    rule = {"type": "string", "pattern": "^(a+)+$"}
    tool = schema("probe", q=rule)
    tool["function"]["parameters"] |= {"patternProperties": {"^(b+)+$": {}}, "additionalProperties": False}
    started = time.monotonic()
    checked = check_arguments(tool, {"q": "a" * 40 + "!", "b" * 40 + "!": 1}, {}, ImageBook())
    assert time.monotonic() - started < 2
    assert checked.values == {"q": "a" * 40 + "!"}
