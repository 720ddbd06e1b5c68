"""The randomness of sampling, named instead of drawn: a trajectory's key and a position give one uniform number.

A key is a hash of the trajectory's names; uniforms come from the key by a 64-bit mixer (splitmix64's finisher) in
numpy, for a whole batch at once. Invariants: the same names give the same numbers on every machine, in any order and
in any batch; different names, different keys (128 bits).
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = (np.uint64(bits) for bits in (27, 30, 31, 11))


def noise_key(*, seed: int, round: int, prompt: str, session: int, attempt: int, trajectory: int) -> bytes:
    """The 16 bytes that name a trajectory's randomness."""
    # The prompt comes last, behind numbers that hold no separator, so that no two lists of names read the same.
    names = b"%d/%d/%d/%d/%d/%b" % (seed, round, session, attempt, trajectory, prompt.encode("utf-8", "surrogatepass"))
    return hashlib.blake2b(names, digest_size=KEY_BYTES).digest()


def as_key(noise: bytes) -> bytes:
    """A key as it is; names of any other length are hashed to one."""
    return noise if len(noise) == KEY_BYTES else hashlib.blake2b(noise, digest_size=KEY_BYTES).digest()


def key_words(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    """The two 64-bit words of each key, [N, 2]."""
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 2)


def uniforms(words: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, from the row's two words [N, 2] and its position [N]."""
    mixed = _mix(words[:, 0] + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return (_mix(mixed ^ words[:, 1]) >> _S11).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)
