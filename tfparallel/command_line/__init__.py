"""The command line: tables of commands and flags, help, usage errors, exit codes.

command_table, flag_table   one row per command, one row per flag
exclusions                  flags that exclude each other
flags, help                 absl flags, usage errors and help, generated from the rows
contradictions              checks of flag combinations that rows cannot express
options                     the parsed values of flags
runner                      runs a command from its arguments to its exit code
"""
