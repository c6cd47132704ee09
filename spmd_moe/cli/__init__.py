"""The command `spmd-moe`: check a layer, train with it, show the bugs that types refuse.

main            arguments, one line for bad input, exit codes
terminal        the console, and the error that is one line
degrees         `dp=2,tp=2,ep=2,sp=on`
check           the flow: check_options, check_layer, check_json, progress
show_layer      what people read: show_crossings, tables, legends
presets, scale  published sizes; a small layer that is cut as a large one is
trace           the check on meta tensors: crossings, and what is sent and held
simulate        the run on simulated ranks beside one device
compare_meshes  bytes and memory for every mesh of so many ranks; divisors
check_module    a typed module of the user's: user_code, forward_hints, own_module,
                run_own_module
refused         the program that `check` ends with
train, bugs     the other two commands: spmd_moe.training, spmd_moe.bugs
train_job       what train is asked for, looked at; train_rank: one of its processes
"""
