"""The only place that knows Thrift: the interface file, the codec, the TCP server.

    pinlater.thrift  the interface (a link to thrift/pinlater.thrift): the protocol document
    interface        that file, loaded, as plain tables of structs and methods
    binding          which struct of the interface is which type of `pinlaterd.model`
    message          the head of a message: method, type, sequence number
    walk             where a message or an unknown field ends, without reading it
    reader, writer   any struct of the interface from and to bytes, field by field
    fast_read, fast_write   the hot messages in their usual layout, with the same meaning
    peek             what the router must know of a call: the cost does not grow with the jobs
    codec            what others use: peek, decode, encode
    framing          TCP bytes to messages, no I/O
    compact          the compact protocol to binary and back
    strangers        what else may come to an open port
    connection, buffers, server   the asyncio side

Others see `pinlaterd.model` types and bytes, never a Thrift struct. May rely on `config`, `stats`
and what is below them.
"""
