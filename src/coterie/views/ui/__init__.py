"""`coterie ui`: the runs of a folder in a browser, while they go on. Needs the extra `ui`.

store.py   run folders, read again only when they have changed; refuses what lies outside of the folder
guard.py   who may ask: host names, the token, headers
app.py     the pages and what they ask for
"""
