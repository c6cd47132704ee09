"""Published bugs of distributed training, each as a wrong and a right program.

record      what a bug is                    measure     run it: who refuses?
inputs      values for the programs          kinds       the kinds, C1 to C14
c01_ ...    the programs, a file per kind    catalogue   all of them, in order
"""
