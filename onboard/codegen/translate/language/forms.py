"""Forms of run-time values (`Code.form`): what else is known of a tensor or a dict."""

from __future__ import annotations

COMPLEX = "complex"
"""Form of a rotary embedding's output that generated code holds as one complex tensor instead of
(cos, sin).
"""

POSITIONS = "positions"
"""Form of `position_ids` where they stand for positions of one row that transformers counts."""

SCALED = "positions, scaled"
"""Form of `POSITIONS` times or divided by a number: no indices."""

FIRST = "the first position"
"""Form of the least of `POSITIONS`, from which on a table of the text has their rows."""

COUNTED = (POSITIONS, SCALED)
"""Forms of positions: integers that others read, too, so that nothing changes them in place."""

TRIANGLE = "triangle"
"""Form of a buffer of ones where a query (row) may see a key (column), zeros above the diagonal; or
of its corner.
"""

SQUARE = "square of ones"
"""Form of a matrix of ones with as many rows as columns, of which a triangle may be a mask."""

ALL_TRUE = "truth values, all true"
"""Form of a mask of padding that code makes itself where it is given none."""

NONE_TRUE = "truth values, none true"
"""Form of the opposite of `ALL_TRUE`: what it hides is nothing."""

ROWS = "rows"
"""Form of a table's rows at `POSITIONS`: transformers has [sequence, dim], generated code [batch,
sequence, dim].
"""

ROWS_OF_TEXT = "rows of one text"
"""Form of `ROWS` that modeling code gave a dimension of size one in front, [1, sequence, dim]:
generated code has the batch there.
"""

ROWS_OF_HEADS = "rows beside heads"
"""Form of rows at `POSITIONS` of a table with two dimensions of size one in front: [1, 1, sequence,
dim], and [batch, 1, sequence, dim] in generated code.
"""

EVERY = "every position"
"""Form of the numbers of all positions that the config allows, which a forward counts."""

TABLE = "rows of every position"
"""Form of a table that is made of `EVERY`, [positions, dim]; its rows at `POSITIONS` are `ROWS`."""

SEVERAL_ROWS = "rows of several tables"
"""Form of a tuple of `ROWS`."""

CHUNKED = "chunks"
"""Form of the mask of attention in chunks, which exists at run time; where it is None, attention is
plainly causal.
"""

UPCAST = "upcast"
"""Form of a tensor that was cast to float32, as modeling code does with queries and keys before it
multiplies them.
"""

MAYBE = "what may be None"
"""What a dict of that form has."""

SHARED = "shared"
"""Form of a dict, empty at first, in which layers leave keys and values for later layers."""

CHANNELS = "channels"
"""Form of a tensor [batch, channels, sequence]: a transposition of 1 and 2 moves its last
dimension, too.
"""

SHIFTED = "tokens one later"
"""Form of hidden states [batch, sequence, channels] in which each token has those of the one before."""

KEYS = "keys"
"""Form of consecutive numbers that count keys, in a model whose attention has a bias that is linear
in them (ALiBi).
"""

QUERIES = "queries"
"""Form of numbers that count queries, the same for all keys of each, in such a model."""

ONES = "ones"
"""Form of a vector that was made of ones, one for each text."""

UNIFORM = "uniform"
"""Form of a number, known before any text is, that stands for a vector which has it for each
text.
"""

ZEROS = "zeros"
"""Form of a tensor that was made of zeros."""

TUPLE = "tuple"
"""Form of a tuple, whose items may be None, or tuples."""

TENSORS = "tuple of tensors"
"""Form of a tuple whose items are tensors, each of them."""

LIST = "list"
"""Form of a list, which generated code may have as a tuple."""

DICT = "dict"
"""Form of a dict of whose entries nothing is known."""

TUPLES = "list of tuples"
"""Form of a list whose items are tuples."""

TUPLE_OR_NOT = "tuple or not"
"""Form of what is a tuple on one way through the code, and none on another."""

LIST_OR_NOT = "list or not"
"""Form of what is a list on one way through the code, and none on another."""

ANY_TUPLE = (TUPLE, TENSORS)
"""Forms of a tuple."""
