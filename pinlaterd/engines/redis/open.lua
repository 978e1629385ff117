-- Take ownership. Arguments: the shard, now_ms, lease in ms, who asks, ids to skip after an unclean
-- end, 1 if who asks was an owner before and did not end in order: a replica that has taken the
-- server's place may not know of that. Who asks again, having lost its connection, need not wait for the end of its own lease.
-- Returns OK, the token, start_ms, clean, names of queues; or OWNED, the owner's token, what is
-- left of its lease in ms; or REFUSED and why.

local now, lease_ms, who, skipped = take_number(), take(), take(), take()
local ended_badly = take() == '1'

local owner = redis.call('GET', LEASE)
if owner and string.match(owner, '^[^:]*:[^:]*:(.*)$') ~= who then
  return { 'OWNED', owner, redis.call('PTTL', LEASE) }
end
-- The first write is one that a full Redis takes, so that a shard can be opened on it.
local freed = redis.pcall('DEL', LEASE)
if type(freed) == 'table' and freed.err then
  return { 'REFUSED', freed.err }
end

local record = redis.call('HMGET', RECORD, 'start_ms', 'clean')
local start = math.max(now, (tonumber(record[1]) or -1) + 1)
local clean = record[2] ~= '0' and not ended_badly
local fence = redis.call('HINCRBY', RECORD, 'fence', 1)
local token = string.format('%.0f:%.0f:%s', fence, start, who)
redis.call('HSET', RECORD, 'owner', token, 'start_ms', string.format('%.0f', start), 'clean', 0)
redis.call('SET', LEASE, token, 'PX', lease_ms)

local queues = redis.call('ZRANGE', QUEUES, 0, -1)
if not clean then
  for _, queue in ipairs(queues) do
    if redis.call('EXISTS', counter_key(queue)) == 1 then
      redis.call('INCRBY', counter_key(queue), skipped)
    end
  end
end
return { 'OK', token, start, clean and 1 or 0, queues }
