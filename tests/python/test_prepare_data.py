"""Data preparation: what is trained, what is refused, what the file holds."""

import json
import tempfile
import unittest
from pathlib import Path

import support  # first: it sets the import path

import prepare_data
from chat_format import MASKED, FormatError, ModelTokenizer, Tokens
from records import Options, record_tokens
from safetensors import safe_open

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello 🙂"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


class Folder(unittest.TestCase):
    """A temporary folder, and a tokenizer for each template asked for."""

    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)

    def model(
        self, template: str | None = support.CHATML, adds_bos: bool = False
    ) -> ModelTokenizer:
        return ModelTokenizer(support.make_model(self.folder / "model", template, adds_bos))

    def trained(self, tokenizer: ModelTokenizer, tokens: Tokens) -> str:
        for token, label in zip(tokens.ids, tokens.labels, strict=True):
            self.assertIn(label, (MASKED, token))
        return tokenizer.decode([x for x in tokens.labels if x != MASKED], keep_special=True)


class Masking(Folder):
    def check(self, template: str, record: dict, expected: str, **options: object) -> Tokens:
        tokenizer = self.model(template)
        tokens = record_tokens(record, tokenizer, Options(**options))
        self.assertEqual(self.trained(tokenizer, tokens), expected)
        return tokens

    def test_every_assistant_turn_and_its_terminator(self) -> None:
        self.check(support.CHATML, {"messages": CHAT}, "Hello 🙂<|im_end|>4<|im_end|>")

    def test_last_turn_only(self) -> None:
        self.check(support.CHATML, {"messages": CHAT}, "4<|im_end|>", turns="last")

    def test_turn_flagged_as_context(self) -> None:
        chat = [dict(CHAT[0]), {**CHAT[1], "train": False}, *CHAT[2:]]
        self.check(support.CHATML, {"messages": chat}, "4<|im_end|>")

    def test_template_that_trims(self) -> None:
        chat = [CHAT[0], {"role": "assistant", "content": "  spaced out \n"}]
        tokens = self.check(support.TRIMMING, {"messages": chat}, "spaced out<|im_end|>")
        self.assertEqual(tokens.ids.count(0), 1, "one BOS, the template's")

    def test_template_that_rewrites_earlier_turns(self) -> None:
        chat = [
            CHAT[0],
            {"role": "assistant", "content": "<think>a</think>one"},
            CHAT[2],
            {"role": "assistant", "content": "<think>b</think>two"},
        ]
        expected = "one<|im_end|><think>b</think>two<|im_end|>"
        self.check(support.THINKING, {"messages": chat}, expected)

    def test_space_before_the_terminator(self) -> None:
        self.check(support.SPACED, {"messages": CHAT[:2]}, "Hello 🙂 <eos>")

    def test_template_that_cannot_be_masked_is_refused(self) -> None:
        with self.assertRaisesRegex(FormatError, "content once"):
            record_tokens({"messages": CHAT}, self.model(support.ECHOING), Options())

    def test_content_that_looks_like_template(self) -> None:
        odd = "<|im_end|>\n<|im_start|>assistant\nno"
        chat = [{"role": "user", "content": odd}, {"role": "assistant", "content": odd}]
        self.check(support.CHATML, {"messages": chat}, odd + "<|im_end|>")


class Forms(Folder):
    def check(self, record: dict, expected: str, text: str | None = None) -> None:
        tokenizer = self.model(adds_bos=True)
        tokens = record_tokens(record, tokenizer, Options())
        self.assertEqual(self.trained(tokenizer, tokens), expected)
        if text is not None:
            self.assertEqual(tokenizer.decode(tokens.ids, keep_special=True), text)

    def test_sharegpt(self) -> None:
        turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hey"}]
        self.check({"conversations": turns}, "Hey<|im_end|>")

    def test_alpaca(self) -> None:
        record = {"instruction": "Add", "input": "1 2", "output": "3"}
        text = "<|im_start|>user\nAdd\n\n1 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
        self.check(record, "3<|im_end|>", text)

    def test_prompt_completion(self) -> None:
        self.check({"prompt": "a b", "completion": " c"}, " c<eos>", "<bos>a b c<eos>")

    def test_prompt_completion_messages(self) -> None:
        self.check({"prompt": CHAT[:3], "completion": CHAT[3:]}, "4<|im_end|>")

    def test_text_has_one_bos(self) -> None:
        self.check({"text": "plain"}, "plain<eos>", "<bos>plain<eos>")
        self.check({"text": "<bos>plain"}, "plain<eos>", "<bos>plain<eos>")

    def test_given_tokens(self) -> None:
        record = {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, 0]}
        tokens = record_tokens({**record, "attention_mask": [1, 1, 1, 0]}, self.model(), Options())
        self.assertEqual(tokens, Tokens([5, 6, 7], [MASKED, 6, 7]))


class Files(Folder):
    def run_on(self, *lines: object, options: tuple = ()) -> tuple[object, Path]:
        model = support.make_model(self.folder / "model")
        data = support.write_lines(self.folder / "data.jsonl", *lines)
        output = self.folder / "out" / "tokens.safetensors"
        arguments = ("--model", model, "--data", data, "--output", output, *options)
        return support.call_tool(prepare_data.main, *arguments), output

    def test_as_a_program(self) -> None:
        self.run_on({"text": "x"})  # makes the model
        data = support.write_lines(self.folder / "bad.jsonl", "broken")
        done = support.run_tool(
            "prepare_data.py", "--model", self.folder / "model", "--data", data, "--output", "never"
        )
        self.assertEqual(done.returncode, 2)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_contract(self) -> None:
        done, output = self.run_on({"messages": CHAT}, "", {"messages": CHAT[:1]}, {"text": "abc"})
        self.assertEqual(done.returncode, 0, done.stderr)
        with safe_open(output, "np") as file:
            data = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata()
        self.assertEqual(set(data), {"input_ids", "labels", "sample_offsets"})
        kinds = {name: str(value.dtype) for name, value in data.items()}
        self.assertEqual(
            kinds, {"input_ids": "int32", "labels": "int32", "sample_offsets": "int64"}
        )
        total = len(data["input_ids"])
        self.assertEqual(len(data["labels"]), total)
        self.assertEqual(list(data["sample_offsets"]), [0, total - 4, total])
        kept = data["labels"] != MASKED
        self.assertTrue((data["labels"][kept] == data["input_ids"][kept]).all())
        self.assertEqual(metadata["format"], "rowshard.tokens")
        self.assertEqual(metadata["version"], "1")
        self.assertEqual(metadata["samples"], "2")
        self.assertEqual(metadata["dropped"], "1")
        self.assertEqual(metadata["source"], "data.jsonl")

    def test_bad_lines(self) -> None:
        good = {"text": "fine"}
        bad = {
            "not JSON": '{"text": ',
            "not a JSON object": "[1]",
            "no known form": {"question": "?"},
            "must be text": {"text": 3},
            "vocabulary": {"input_ids": [1, 100000]},
            "items": {"input_ids": [1, 2], "labels": [1]},
            "unknown role": {"conversations": [{"from": "robot", "value": "x"}]},
            "needs 'role'": {"messages": [{"content": "x"}]},
        }
        for reason, line in bad.items():
            with self.subTest(reason):
                done, output = self.run_on(good, line)
                self.assertEqual(done.returncode, 2)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
                self.assertIn("data.jsonl:2: ", done.stderr)
                self.assertIn(reason, done.stderr)
                self.assertFalse(output.exists() or list(self.folder.glob("out/.*")))

    def test_nothing_to_train(self) -> None:
        done, output = self.run_on({"messages": CHAT[:1]}, {"input_ids": [5], "labels": [5]})
        self.assertEqual(done.returncode, 2)
        self.assertIn("no sample with a trainable token", done.stderr)
        self.assertFalse(output.exists())

    def test_overlong(self) -> None:
        lines = ({"text": "a" * 30}, {"text": "bc"})
        done, _ = self.run_on(*lines, options=("--max-length", 10))
        self.assertEqual(done.returncode, 2)
        self.assertIn("data.jsonl:1: 31 tokens, more than 10", done.stderr)
        for choice, offsets in (("drop", [0, 3]), ("truncate", [0, 10, 13])):
            done, output = self.run_on(*lines, options=("--max-length", 10, "--overlong", choice))
            self.assertEqual(done.returncode, 0, done.stderr)
            with safe_open(output, "np") as file:
                self.assertEqual(list(file.get_tensor("sample_offsets")), offsets)
            self.assertIn("too long", done.stdout)

    def test_failure_keeps_the_old_file(self) -> None:
        _, output = self.run_on({"text": "first"})
        before = output.read_bytes()
        done, _ = self.run_on("broken")
        self.assertEqual(done.returncode, 2)
        self.assertEqual(output.read_bytes(), before)

    def test_missing_model_and_file(self) -> None:
        for flag in ("--model", "--data"):
            paths = {"--model": support.make_model(self.folder / "m"), "--data": self.folder / "d"}
            support.write_lines(paths["--data"], {"text": "x"})
            paths[flag] = self.folder / "absent"
            pairs = [part for pair in paths.items() for part in pair]
            done = support.call_tool(
                prepare_data.main, *pairs, "--output", self.folder / "o"
            )
            self.assertEqual(done.returncode, 2)
            self.assertIn("absent", done.stderr)

    def test_model_without_template(self) -> None:
        tokenizer = self.model(template=None)
        with self.assertRaisesRegex(FormatError, "no chat template"):
            record_tokens({"messages": CHAT}, tokenizer, Options())


class ByHand(Folder):
    def test_encode_and_decode(self) -> None:
        model = support.make_model(self.folder / "model")
        done = support.run_tool("tokenize.py", "encode", "--model", model, "--chat", "Hi 🙂")
        self.assertRegex(done.stdout, r"^\d+(,\d+)*\n$")
        ids = done.stdout.strip()
        done = support.run_tool(
            "tokenize.py", "decode", "--model", model, "--keep-special", "--ids", ids
        )
        self.assertEqual(
            done.stdout, "<|im_start|>user\nHi 🙂<|im_end|>\n<|im_start|>assistant\n\n"
        )
        done = support.run_tool("tokenize.py", "decode", "--model", model, "--ids", "1,-2")
        self.assertEqual(done.returncode, 2)


class ShippedData(unittest.TestCase):
    """The quickstart's own lines keep the form they teach."""

    def test_form_and_separation(self) -> None:
        folder = support.ROOT / "launch" / "data"
        questions: dict[str, set[str]] = {}
        for name in ("train", "eval"):
            questions[name] = set()
            for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
                user, assistant = json.loads(line)["messages"]
                answer = json.loads(assistant["content"])
                self.assertEqual(list(answer), ["topic", "answer", "confidence"])
                self.assertIn(answer["confidence"], ("high", "medium", "low"))
                self.assertNotIn(user["content"].lower(), questions[name])
                questions[name].add(user["content"].lower())
        self.assertFalse(questions["train"] & questions["eval"])
        prompts = (folder / "prompts.txt").read_text(encoding="utf-8").lower().splitlines()
        self.assertLessEqual(set(prompts), questions["eval"])


if __name__ == "__main__":
    unittest.main()
