-- Renew the lease. Arguments: the shard, token, lease in ms.

return begin_write(false) or { 'OK' }
