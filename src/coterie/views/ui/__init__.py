"""`coterie ui`: the runs of a folder in a browser, live. Requires the extra `ui`.

store.py   run folders, read again only when they have changed; refuses paths outside the folder
guard.py   who may connect: host names, the token, headers
app.py     the pages and their data
"""
