"""Chat templates render as transformers renders them, and neither template nor messages can leave the sandbox."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from checkpoints import BOS, write_tiny_checkpoint
from gguf_files import write_tiny_gguf
from transformers import AutoTokenizer

from tailrace.model import chat
from tailrace.model.chat import ChatTemplate
from tailrace.model.errors import ClientError, ConfigError
from tailrace.model.source import open_source

CONVERSATIONS = [
    [{"role": "user", "content": "What is 2 < 3 & 'x'?"}],
    [
        {"role": "system", "content": "Be brief. 你好 🙂"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": " hello <|im_end|>"},
        {"role": "user", "content": "bye\n"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "Zürich", "n": 1.5}}}]
TEMPLATES = {
    "whitespace control": "{{ bos_token }}{%- for m in messages %}\n  {%- if m.role == 'user' %}[U]{% endif %}\n"
    "    {{ m['content'] | trim }}\n{% endfor %}\n{%- if add_generation_prompt %}>{% endif %}",
    "namespace and tools": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{% if tools is not none %}{{ tools | tojson(indent=2) }}{{ tools[0] | tojson }}{% endif %}",
    "loop controls": "{% for m in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "undefined is empty": "{{ nothing }}{{ messages[0].missing }}{{ eos_token if eos_token is defined }}",
    "strings": "{{ messages[0]['content'].split(' ')[0] ~ '-' * 20 ~ ('%03d' % 7) }}{{ dict(a=1)['a'] }}"
    "{{ messages[::-1][0].content[:3].upper() }}{{ range(3) | list | join(',') }}",
    "macro": "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    directory = write_tiny_checkpoint(tmp_path_factory.mktemp("chat") / "m", "llama")
    return open_source(str(directory)), AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendering_equals_transformers(tiny, name: str, messages: list, tools: list | None):
    source, theirs = tiny
    ours = ChatTemplate(TEMPLATES[name], special_tokens=source.tokenizer.special_tokens)
    for add in (False, True):
        expected = theirs.apply_chat_template(
            messages, tools=tools, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=add
        )
        assert ours.render(messages, tools, add_generation_prompt=add) == expected


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_checkpoints_own_template_gives_the_ids_that_transformers_gives(tiny, messages: list):
    source, theirs = tiny
    ids = source.tokenizer.encode(source.chat_template.render(messages), special=False)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_the_template_is_found_in_each_place_where_checkpoints_put_it(tmp_path: Path):
    directory = write_tiny_checkpoint(tmp_path / "m", "llama")
    config_path = directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text())

    def rendered() -> str | None:
        template = open_source(str(directory)).chat_template
        return template and template.render([])

    config["chat_template"] = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "listed"}]
    config_path.write_text(json.dumps(config))
    assert rendered() == "listed"
    (directory / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert rendered() == f"file {BOS}"
    (directory / "chat_template.jinja").unlink()
    del config["chat_template"]
    config_path.write_text(json.dumps(config))
    assert rendered() is None
    gguf = open_source(str(write_tiny_gguf(tmp_path / "m.gguf", "llama")))
    assert gguf.chat_template is not None
    assert gguf.chat_template.render(CONVERSATIONS[0]).endswith("<|im_start|>assistant\n")


def test_strftime_now_uses_the_clock_it_is_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render([]) == "26 Jul 2024"


def test_variables_reach_the_template():
    template = ChatTemplate("{{ 'think' if enable_thinking is not defined or enable_thinking else 'quick' }}")
    assert (template.render([]), template.render([], enable_thinking=False)) == ("think", "quick")


def test_a_template_that_refuses_a_conversation_is_the_clients_fault():
    template = ChatTemplate(
        "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    )
    with pytest.raises(ClientError, match="roles must alternate") as refused:
        template.render([{"role": "assistant", "content": ""}])
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "text", ["{{ messages[0].content + 1 }}", "{{ messages[7].x }}", "{{ 1 // 0 }}", "{{ nothing.at.all }}"]
)
def test_a_template_that_fails_on_a_conversation_is_the_clients_fault(text: str):
    with pytest.raises(ClientError):
        ChatTemplate(text).render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_parse_is_the_operators_fault():
    with pytest.raises(ConfigError, match="model/chat: does not parse"):
        ChatTemplate("{% for m in messages %}", where="model/chat")
    with pytest.raises(ConfigError, match="more than"):
        ChatTemplate("x" * (chat.MAX_TEMPLATE_CHARS + 1))


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages[0]['content'].__class__.__base__ }}",
    "{{ ''|attr('__class__') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__class__.__init__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ ('{0.__cla'~'ss__}').format(1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}",
    "{{ namespace(_a=1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.name }}",
    "{{ lipsum.__globals__ }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_the_sandbox_cannot_be_left(text: str):
    messages = [{"role": "user", "content": "secret"}]
    try:
        rendered = ChatTemplate(text).render(messages)
    except ClientError:
        rendered = ""
    assert messages == [{"role": "user", "content": "secret"}]
    for leak in ("<class", "root:", "uid=", "function", "object at", "module"):
        assert leak not in rendered


@pytest.mark.parametrize("text", ["{{ 7 * 7 }}", "{{ ''.__class__ }}", "{% raw %}", "{{ bos_token }}"])
def test_template_syntax_in_messages_stays_text(tiny, text: str):
    source, _ = tiny
    assert text in source.chat_template.render([{"role": "user", "content": text}])


BOMBS = [
    "{{ 'a' * 100000000 }}",
    "{{ 100000000 * 'a' }}",
    "{{ [1] * 100000000 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 2 ** 100000 }}",
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%.1000000000f' % 1 }}",
    "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", BOMBS)
def test_a_template_cannot_spend_without_bound(text: str):
    with pytest.raises(ClientError):
        ChatTemplate(text).render([{"role": "user", "content": "x"}])


def test_long_numbers_in_messages_are_no_format_widths():
    messages = [{"role": "user", "content": " call 1234567890, 100% {1:2345678} "}]
    text = "{% for m in messages %}{{ m.content.strip() ~ '%s' % m.content ~ '{}'.format(m.content) }}{% endfor %}"
    content = messages[0]["content"]
    assert ChatTemplate(text).render(messages) == content.strip() + content + content


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat, "MAX_OUTPUT_CHARS", 1000)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert len(template.render([{"content": "x" * 999}])) == 999
    with pytest.raises(ClientError, match="1000 characters"):
        template.render([{"content": "x" * 600}] * 2)
