"""What the commands share: their table, the table of their flags, help, mistakes, exit codes.

command_table, flag_table   a row a command, a row a flag
exclusions                  which flags exclude each other
flags, help                 what is made of the rows
contradictions              what a row cannot say about flags that are given together
options                     the flags as they are meant, read once
runner                      from a line of arguments to a command, and to its exit code
"""
