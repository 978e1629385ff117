-- A page of one set. Arguments: the shard, queue, priority, state, score and id to begin behind (or
-- '' and ''), limit. Returns OK and a table of id and score of each.

local queue, priority, state = take(), take(), take()
local score, id, limit = take_number(), take(), take_number()
local set = set_key(queue, priority, state)
if damage(set, 'zset') then
  return { 'OK', {} }
end
local first = score and rank_behind(set, score, id) or 0
return { 'OK', redis.call('ZRANGE', set, first, first + limit - 1, 'WITHSCORES') }
