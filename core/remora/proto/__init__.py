"""The wire's messages, generated from the .proto files beside this one; the law: nothing is written by hand here."""
