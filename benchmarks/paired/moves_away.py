import os
import tempfile

with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    print(os.path.exists(__file__), os.path.isabs(__file__), os.path.basename(__file__))
    os.umask(0o77)
    os.environ.clear()
    os.environ["ONLY"] = "this"
    with open("x", "w") as file:
        file.write("x")
print(dict(os.environ))
