"""What every store does, whichever backend it is: the sentences of the protocol, as tests.

A backend's test module has two fixtures, `store` (empty) and `open_another` (a function that opens the same store
again; for a store of one process it may return the same object), and imports all of this.
"""

from store.conformance_change import *  # noqa: F403
from store.conformance_put import *  # noqa: F403
from store.conformance_shared import *  # noqa: F403
