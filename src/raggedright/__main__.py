"""`python -m raggedright` is the `raggedright` command."""

import sys

from raggedright.cli import main

sys.exit(main())
