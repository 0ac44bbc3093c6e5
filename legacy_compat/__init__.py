"""What became of V1: a table, errors that explain, import shims, a scanner and a codemod."""
