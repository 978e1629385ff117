"""The only place that knows Thrift: the interface file, the codec, the TCP server.

    interface    the interface file (pinlater.thrift, a link) as tables; types of values in bytes
    structs      any struct of the interface from and to bytes, by the tables
    peek         the head of a message, and what the router must know of a call
    tuned        fast readers of enqueues, dequeues and acks; long lists in parts
    answers      fast readers and writers of the answers to enqueues and dequeues
    codec        what others use: peek, decode, encode
    framing      TCP bytes to messages, no I/O
    compact      the compact protocol to binary and back
    connection   one client's connection: messages in, answers out in the order of the calls
    server       the port that accepts connections

Others see `pinlaterd.model` types and bytes, never a Thrift struct.
"""
