"""The ways in which families of models write calls and thoughts: one table, a few shapes of calls, and their detection.

`table` names the families. Each of the other modules but `detect`, `lark` and `reading` is one shape: it reads calls
from streamed text, writes them, and gives the grammar that forces them.
"""
