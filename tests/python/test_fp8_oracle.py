"""The NumPy quantiser against the table of its rule, and the committed golden file against it."""

import unittest

import numpy as np

import fp8_oracle as oracle


def scales_of(amax: float, fmt: str = "e4m3", dtype: str = "f32", power_of_two: bool = True):
    block = np.array([[amax, 0.0]], np.float32)
    return oracle.block_multiplier(block, "128x128", fmt, dtype, power_of_two)


class Oracle(unittest.TestCase):
    def test_table_of_the_rule(self) -> None:
        self.assertEqual(scales_of(0), (1, 1))
        self.assertEqual(scales_of(1), (256, 2**-8))
        self.assertEqual(scales_of(1, power_of_two=False)[0], 448)
        self.assertEqual(scales_of(448), (1, 1))
        self.assertEqual(scales_of(448.5), (0.5, 2))
        self.assertEqual(scales_of(1e-40), (2.0**127, 2.0**-127))
        self.assertEqual(scales_of(np.inf), (1, 1))
        self.assertEqual(scales_of(np.nan), (1, 1))

    def test_encode_rounds_to_even_and_saturates(self) -> None:
        cases = [(0.0, 0x00), (-0.0, 0x80), (448.0, 0x7E), (1e9, 0x7E), (-np.inf, 0xFE), (1.0, 0x38)]
        cases += [(1.0625, 0x38), (1.1875, 0x3A), (2.0**-10, 0x00), (1.5 * 2.0**-9, 0x02)]
        for value, code in cases:
            self.assertEqual(int(oracle.encode(np.array([value]), "e4m3")[0]), code, value)
        self.assertEqual(int(oracle.encode(np.array([np.nan]), "e5m2")[0]), 0x7F)
        self.assertEqual(int(oracle.encode(np.array([-1e9]), "e5m2")[0]), 0xFB)

    def test_every_code_encodes_to_itself(self) -> None:
        for fmt in ("e4m3", "e5m2"):
            values = oracle.code_values(fmt)
            np.testing.assert_array_equal(oracle.encode(values, fmt), np.arange(len(values)))

    def test_mx_scale_rounds_up(self) -> None:
        def code(amax: float) -> int:
            block = np.array([amax], np.float32)
            return int(oracle.block_multiplier(block, "mx 1x32", "e4m3", "f32", True)[1])

        self.assertEqual(code(448), 127)
        self.assertEqual(code(448.5), 128)
        self.assertEqual(code(0), 0)
        self.assertEqual(code(np.inf), 254)

    def test_committed_golden_file(self) -> None:
        self.assertEqual(
            oracle.GOLDEN.read_bytes(), oracle.golden(), "run tests/python/fp8_oracle.py"
        )


if __name__ == "__main__":
    unittest.main()
