"""The only place that knows Thrift: the interface file, the codec, the TCP server.

    pinlater.thrift   the interface (a link to thrift/pinlater.thrift): the protocol document
    interface         that file as tables; TBinaryProtocol: types of values, where a value ends
    structs           any struct of the interface from and to bytes, by the tables
    peek              the head of a message, and what the router must know of a call
    tuned             fast readers of enqueues, dequeues and acks; long lists in parts
    answers           fast readers and writers of the answers to enqueues and dequeues
    codec             what others use: peek, decode, encode
    framing           TCP bytes to messages, no I/O
    compact           the compact protocol to binary and back
    connection, server   the asyncio side

Others see `pinlaterd.model` types and bytes, never a Thrift struct. May rely on `config`, `stats`,
`lifecycle` and what is below them.
"""
