"""What an answer must look like, as requests say it: `response_format` of OpenAI, `structured_outputs` and `guided_*` of vLLM."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from penstock.engine.frontend.errors import ApiError
from penstock.engine.grammar import Grammar, GrammarKind, Tag, Tags
from penstock.plain_errors import explained
from penstock.prompt.errors import PromptError
from penstock.prompt.tools import check_depth

MAX_CHOICE_STRINGS = 4096
_ANY_OBJECT = {"type": "object"}
_Text = Annotated[str, Meta(min_length=1)]
Schema = dict[str, Any] | bool


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `json_schema` of a `response_format`."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern="^[A-Za-z0-9_-]+$")]
    """Accepted and of no effect, as `description` is."""
    schema: Schema
    description: str | None = None
    strict: bool | None = None
    """False: keywords that cannot be enforced are left out. Otherwise they are refused."""


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Markup within which the text follows a schema."""

    begin: _Text
    schema: Schema
    end: str


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's; `structural_tag` with `structures` and `triggers` is vLLM's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = "text"
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[StructuralTag], Meta(min_length=1)] | None = None
    triggers: Annotated[list[_Text], Meta(min_length=1)] | None = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `text.format` of a response: the same without its nesting."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: Schema | None = None
    description: str | None = None
    strict: bool | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's: exactly one of the first six, and how JSON is spaced."""

    json: Schema | str | None = None
    regex: _Text | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICE_STRINGS)] | None = None
    grammar: _Text | None = None
    """EBNF where a line has `::=`, else Lark."""
    json_object: bool | None = None
    structural_tag: str | None = None
    """The `response_format` of this type as a JSON string."""
    whitespace_pattern: _Text | None = None
    """A regular expression for the space between the tokens of JSON."""
    disable_any_whitespace: bool = False
    """JSON is written without space."""


KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's former fields → their names in `structured_outputs`."""


def read_guided(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with vLLM's former fields as the `structured_outputs` that they are; `ApiError` 400 where both are given."""
    given = {name: body[name] for name in (*GUIDED, "guided_whitespace_pattern") if body.get(name) is not None}
    rest = {name: value for name, value in body.items() if name not in GUIDED and name != "guided_whitespace_pattern"}
    if not given:
        return rest
    if body.get("structured_outputs") is not None:
        name = next(iter(given))
        raise ApiError(400, f"{name} is the former name of a field of structured_outputs: give one of them", param=name)
    options = {GUIDED.get(name, "whitespace_pattern"): value for name, value in given.items()}
    return rest | {"structured_outputs": options}


def grammar_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None, schema_field: str) -> Grammar | None:
    """The grammar that a request asks for; None: its answer is free. `ApiError` 400 names the field at fault.

    Args:
        response_format: As it came.
        structured: As it came.
        schema_field: Where the format's schema stood.
    """
    formatted = None if response_format is None else _of_response_format(response_format, schema_field)
    if structured is None:
        return formatted
    if formatted is not None:
        raise ApiError(400, "response_format and structured_outputs exclude each other", param="structured_outputs")
    return _of_structured_outputs(structured)


def check_text_format(text: TextFormat) -> ResponseFormat:
    """The format of a response as a chat has it; `ApiError` 400 names what is missing."""
    if text.type != "json_schema":
        return ResponseFormat(text.type)
    for name in ("name", "schema"):
        if getattr(text, name) is None:
            raise ApiError(400, f"text.format of type json_schema needs {name}", param=f"text.format.{name}")
    assert text.name is not None and text.schema is not None
    return ResponseFormat("json_schema", JsonSchemaFormat(text.name, text.schema, text.description, text.strict))


def format_echo(text: TextFormat) -> dict[str, Any]:
    """The format of a response as its answer repeats it."""
    return {name: value for name, value in msgspec.structs.asdict(text).items() if value is not None}


def _of_response_format(form: ResponseFormat, schema_field: str) -> Grammar | None:
    name = "response_format"
    match form.type:
        case "text":
            return None
        case "json_object":
            return _of_schema(_ANY_OBJECT, name)
        case "json_schema":
            if form.json_schema is None:
                raise ApiError(400, f"{name} of type json_schema needs json_schema", param=f"{name}.json_schema")
            return _of_schema(form.json_schema.schema, schema_field, lenient=form.json_schema.strict is False)
        case "structural_tag":
            return _of_tags(form, name)


def _of_structured_outputs(options: StructuredOutputs) -> Grammar | None:
    name = "structured_outputs"
    given = [kind for kind in KINDS if getattr(options, kind) is not None]
    if len(given) != 1:
        raise ApiError(400, f"{name} needs exactly one of {', '.join(KINDS)}", param=name)
    [kind] = given
    param = f"{name}.{kind}"
    spacing: dict[str, Any] = {
        "whitespace_pattern": options.whitespace_pattern,
        "any_whitespace": not options.disable_any_whitespace,
    }
    if options.disable_any_whitespace and options.whitespace_pattern is not None:
        message = "disable_any_whitespace and whitespace_pattern exclude each other"
        raise ApiError(400, message, param=f"{name}.whitespace_pattern")
    match kind:
        case "json":
            schema = options.json
            assert schema is not None
            return _of_schema(_parsed(schema, param) if isinstance(schema, str) else schema, param, **spacing)
        case "json_object":
            if not options.json_object:
                raise ApiError(400, f"{param} is true or absent", param=param)
            return _of_schema(_ANY_OBJECT, param, **spacing)
        case "choice":
            return Grammar("choice", json_text(options.choice, param), param)
        case "structural_tag":
            form = _converted(_parsed(options.structural_tag or "", param), ResponseFormat, param)
            return _of_tags(form, param)
        case "regex":
            return Grammar("regex", options.regex or "", param)
        case _:
            text = options.grammar or ""
            kind_of_text: GrammarKind = "ebnf" if "::=" in text else "lark"
            return Grammar(kind_of_text, text, param)


def _of_schema(schema: Any, param: str, **options: Any) -> Grammar:
    if not isinstance(schema, dict | bool):
        raise ApiError(400, f"{param} must be a JSON schema: an object, true or false", param=param)
    return Grammar("json_schema", json_text(schema, param), param, **options)


def _of_tags(form: ResponseFormat, param: str) -> Grammar:
    if form.structures is None or form.triggers is None:
        raise ApiError(400, f"{param} of type structural_tag needs structures and triggers", param=param)
    tags: list[Tag] = []
    for at, tag in enumerate(form.structures):
        trigger = next((trigger for trigger in form.triggers if tag.begin.startswith(trigger)), None)
        if trigger is None:
            where = f"{param}.structures[{at}].begin"
            raise ApiError(400, f"{where} begins with none of the triggers", param=where)
        json_text(tag.schema, f"{param}.structures[{at}].schema")
        tags.append(Tag(tag.begin, tag.schema, tag.end, trigger))
    return Grammar("tags", msgspec.json.encode(Tags(tags=tags, free=True)).decode(), param)


def json_text(value: Any, param: str) -> str:
    """What a client gave as JSON, with its keys as they came: properties are generated in their order. `ApiError` 400 where it
    nests too deep."""
    try:
        check_depth(value, param)
        return orjson.dumps(value).decode()
    except PromptError as error:
        raise ApiError.from_prompt(error) from None
    except (TypeError, ValueError) as error:
        raise ApiError(400, f"{param} is no JSON: {error}", param=param) from None


def _parsed(text: str, param: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"{param} is not valid JSON: {error}", param=param) from None


def _converted(value: Any, kind: type[ResponseFormat], param: str) -> ResponseFormat:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{param}: {explained(error, kind)}", param=param) from None
